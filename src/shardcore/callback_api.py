"""The Keras callback of `shardcore`. To import this module loads Keras, on torch.

The example has the model of `shardcore.api`, and a directory::

    import tempfile

    directory = tempfile.mkdtemp()
"""

import os

from shardcore import checkpoint_api
from shardcore.bootstrap import environment

environment.choose_backend()
with environment.keras_imported():
    from shardcore.binding.checkpoints.callback import CheckpointCallback, Due


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
