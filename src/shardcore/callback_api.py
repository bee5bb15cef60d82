"""The Keras callbacks of `shardcore`. To import this module loads Keras, on torch.

The example has the model of `shardcore.api`, and a directory::

    import tempfile

    directory = tempfile.mkdtemp()
"""

import os

from shardcore import bootstrap, checkpoint_api
from shardcore.bootstrap import environment
from shardcore.bootstrap.cost import machines
from shardcore.domain.cost.machine import Machine

environment.choose_backend()
with environment.keras_imported():
    from shardcore.adapters.cost.step_measure import measure_on
    from shardcore.binding import keras_private
    from shardcore.binding.checkpoints.callback import CheckpointCallback, Due
    from shardcore.binding.training.step_stats import StepStatsCallback


class ShardedCheckpoint(CheckpointCallback):
    """A Keras callback that saves checkpoints while `fit` runs, and resumes from them.

    Besides that of `save_checkpoint` it saves the epoch, the position in the data and the states
    of `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`; and that of each callback that
    has `state_dict()` and `load_state_dict(state)`. Run the same program again after a crash, on
    any mesh: `fit` goes on after the latest complete checkpoint, at the next step of its epoch.

    An error of the writing is raised on all ranks at the next save, or at the end of `fit`.

    Args:
        directory: The directory of all checkpoints, on a file system that all hosts share.
        every_steps: Every how many steps it saves.
        every_epochs: Every how many epochs it saves; 1 if none of the three is given.
        every_minutes: Every how many minutes it saves, after a step.
        keep: How many complete checkpoints to keep, the newest ones; None for all.
        asynchronous: Whether a thread writes while training goes on. The main thread copies the
            shards to the memory of the host, which takes as much of it as they have bytes. It
            waits for the thread before the next save, and at the end.
        resume: Whether `fit` loads the latest complete checkpoint first.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        CheckpointError: If an interval is not a positive number.

    Example:
        >>> backup = shardcore.ShardedCheckpoint(directory, every_epochs=2, resume=False)
        >>> history = model.fit(x, y, epochs=4, callbacks=[backup], verbose=0)
        >>> shardcore.latest_checkpoint(directory).name
        'step-00000004'
    """

    reads_no_results = True  # of steps; a subclass may read them

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        every_minutes: float | None = None,
        keep: int | None = None,
        asynchronous: bool = True,
        resume: bool = True,
    ) -> None:
        checkpoints = checkpoint_api.checkpoints()
        due = Due(checkpoints.sessions, every_steps, every_epochs, every_minutes)
        super().__init__(checkpoints, directory, due, keep, asynchronous, resume)


class StepStats(StepStatsCallback):
    """A Keras callback that adds figures of the steps to the logs of `fit` and `evaluate`.

    The progress bar, `History`, `CSVLogger`, `TensorBoard` and every other logger show them:

    - `samples_per_second`: rows of the global batch.
    - `tokens_per_second`: tokens of the global batch, padding included, where an input has
      integers and two dims.
    - `step_ms`: from the end of one step to the end of the next.
    - `data_wait`: the share of this time, from 0 to 1, in which the device waited for a batch.
    - `peak_memory_mib`: the most memory so far; of tensors on CUDA, of the process on a CPU.
    - `collective_mib`: what this rank gives to the collectives of a step.
    - `flops_utilization`: the operations of this rank's products, convolutions and attention, as
      a share of the peak of its device, where that is known.

    Logs of an epoch have its means, those of a step the means of the last `every` steps. Each rank
    measures itself, without collectives. Steps stay captured. An eager step is counted operator by
    operator, once for each shape of batches: that step is slower.

    Args:
        every: After how many steps the figures in the logs of steps are new. The host waits for
            the device there, and at the end of an epoch.
        machine: The machine of the ranks, for the peak: its name, a file of `shardcore measure`,
            or a `Machine`. None to recognize a CUDA device by its name.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        ArgumentProblem: If `every` is not a number of steps.
        MachineError: If there is no such machine.
        CallProblem: In a fit over several ranks, if a callback monitors a figure: each rank would
            decide by its own.

    Example:
        >>> history = model.fit(x, y, verbose=0, callbacks=[shardcore.StepStats()]).history
        >>> sorted(history.keys() - {"loss"})  # doctest: +NORMALIZE_WHITESPACE
        ['collective_mib', 'data_wait', 'peak_memory_mib', 'samples_per_second', 'step_ms']
    """

    reads_no_results = True  # of steps; a subclass may read them
    runs_no_code_of_users = True  # a subclass may

    def __init__(self, *, every: int = 50, machine: Machine | str | None = None) -> None:
        sessions = bootstrap.installation().binding.sessions
        described = machines.find(machine) if isinstance(machine, str) else machine
        measure = measure_on(keras_private.torch_device(), described)
        super().__init__(sessions, measure, every)
