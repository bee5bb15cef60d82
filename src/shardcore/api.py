"""The functions of `shardcore` that install it, start ranks, and check a model.

The examples have one model, on a mesh of one device::

    import shardcore

    shardcore.install()
    import keras

    mesh = keras.distribution.DeviceMesh((1, 1), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*hidden/kernel"] = (None, "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )
    hidden = keras.layers.Dense(4, name="hidden")
    model = keras.Sequential([keras.Input((8,)), hidden], name="net")
    model.compile("adam", "mse")
    x, y = keras.random.uniform((16, 8)), keras.random.uniform((16, 4))
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from shardcore import bootstrap
from shardcore.bootstrap.ranks import launching
from shardcore.domain.errors import RankFailed
from shardcore.ports.types import KerasModel
from shardcore.reporting.inspection.explanation import Explanation
from shardcore.reporting.inspection.verification import Verification
from shardcore.reporting.status import Status

if TYPE_CHECKING:
    from shardcore.binding.ranks.session import Sessions

ResultT = TypeVar("ResultT")


def install(strategy: str = "auto", **options: object) -> Status:
    """Gives Keras on PyTorch the `keras.distribution` API.

    Call it before the model is built; before or after Keras is imported. Until a distribution is
    set, Keras computes as before. A second call with the same strategy, or "auto", changes
    nothing; for another strategy call `uninstall()` first.

    Args:
        strategy: How distributed variables are stored: "dtensor", "manual", "single", the name of
            a plug-in's, or "auto" for the best one that is available.
        options: Options of the strategy. "dtensor" and "manual" take `weights` ("compute"
            or "gather"), `gathered` ("per_use" or "per_step") and `links` (a `shardcore.Link` by
            mesh axis).

    Returns:
        The same as `status()`.

    Raises:
        EnvironmentProblem: If Keras runs on another backend, or Keras or torch is missing, too
            old, or newer and does not pass the self-check.
        StrategyError: If the strategy does not exist, cannot be used here or has no such option,
            or if another one is installed.

    Example:
        >>> shardcore.install(strategy="auto").installed
        True
    """
    bootstrap.install(strategy, options)
    return bootstrap.status()


def uninstall() -> None:
    """Restores every Keras name that `install` patched, and unsets the distribution.

    The process group stays open. Variables keep their layouts, so build the model again.

    Example:
        >>> shardcore.uninstall()
        >>> shardcore.status().installed
        False
    """
    bootstrap.uninstall()


def status() -> Status:
    """Returns the strategy in use and why not the others, the mesh, the devices, the versions.

    It does not join the job. `keras.distribution.initialize()`, `list_devices()` and every
    distribution do; before one of them is called, the job has one process.

    Example:
        >>> shardcore.status().mesh_shape, shardcore.status().world_size
        ((1, 1), 1)
    """
    return bootstrap.status()


def verify(model: KerasModel, batch: object = None) -> Verification:
    """Checks that every variable is stored as its layout says. A collective: all ranks call it.

    Per variable it reports path, rule, spec, shapes, bytes on this rank and in all. It checks on
    every rank that the stored shard equals its slice of the full tensor, and that the last
    gradient has the layout of the variable.

    Args:
        model: A built Keras model.
        batch: The global batch, `(x, y)` or `(x, y, sample_weight)`, to compute gradients of; no
            variable changes. Without it, the gradients of the last step are checked.

    Returns:
        The report: print it for a table, `.to_dict()` for data, `.ok` for the verdict.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        CallProblem: If no distribution is set.

    Example:
        >>> shardcore.verify(model, (x, y)).ok
        True
    """
    from shardcore.binding.inspection.verify import verify_model

    return verify_model(model, batch, _sessions())


def explain(model: KerasModel, batch: object, step: str = "train") -> Explanation:
    """Explains one step: every collective, its layer, bytes and reason. All ranks call it.

    It runs one eager step on the batch, on the main thread, and builds what is not built yet. Then
    it restores variables, gradients, optimizer state, metrics and generators. It does not undo
    side effects of your own Python code.

    Args:
        model: A Keras model; compiled, unless the step is "predict".
        batch: The global batch: `(x, y)` or `(x, y, sample_weight)`; for "predict", and for a
            model that has no targets, `x`.
        step: "train", "test" or "predict".

    Returns:
        The explanation: print it for a table, `.to_dict()` for data, `.collectives` and
        `.avoidable`, and `.save("step.html")` or `.save("step.svg")` for a picture.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        ArgumentProblem: If the batch or the step is not valid.
        CallProblem: If the model is not compiled, or this is not the main thread.

    Example:
        >>> shardcore.explain(model, (x, y)).summary()
        'Nothing is moved between ranks: the mesh is of one device.'
    """
    from shardcore.adapters.inspection import StepTracer
    from shardcore.binding.inspection.explain import explain_model

    return explain_model(model, batch, step, _sessions(), StepTracer)


def agree(value: object, how: Literal["any", "all", "rank 0"] = "any") -> Any:
    """Makes one decision for all ranks, such as whether to stop. All ranks call it together.

    A time limit, or a file that asks to stop, is seen by one rank before the others. A rank that
    leaves a loop alone would leave the others waiting.

    Args:
        value: What this rank has found; for "rank 0" its value can be pickled. It may be large.
        how: "any" for whether a rank has a true value, "all" for whether all have, "rank 0" for
            the value of that rank.

    Returns:
        The same on all ranks: a bool, or the value of rank 0.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        ArgumentProblem: If `how` is none of these; on all ranks, if the value cannot be pickled.
        CallProblem: If this is not the main thread.
        RankMismatchError: If a rank does not call it, or with another `how`.

    Example:
        >>> shardcore.agree(3 > 5, "any"), shardcore.agree("step-00000012", "rank 0")
        (False, 'step-00000012')
    """
    from shardcore.binding.ranks.rank_consistency import agree as agree_on_value

    return agree_on_value(value, how, _sessions().processes)


def operator_rule(operator: object, text: str) -> None:
    """Declares how an operator of your own is sharded; without a rule it runs on full tensors.

    A rule has the dims of each operand and each result: letters for dims that may be sharded, all
    dims of one letter together; "-" for a dim that never is. If results lack a letter, each rank
    computes a part of the sum. `shardcore.testing.check_operator_rule` finds a rule that is wrong.

    Declare it where the operator is defined, before or after `install()`. Ranks compare their rules
    when the distribution is set. After that, all ranks call this together. The gradient of the
    operator is made of other operators: one of your own needs its own rule.

    Args:
        operator: The operator with its overload, of `torch.library.custom_op` or
            `torch.library.Library`. It computes new tensors from its operands alone.
        text: The rule, as "n k, k -> n k"; one term for each argument that is a tensor.

    Raises:
        ArgumentProblem: If the text is no rule for the operator, if the operator has another one,
            one of shardcore, or can have none.
        RankMismatchError: If a rank declares another rule, or none.

    Example:
        >>> import torch
        >>> @torch.library.custom_op("api_example::scale", mutates_args=())
        ... def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ...     return x * weight
        >>> shardcore.operator_rule(torch.ops.api_example.scale.default, "n k, k -> n k")
    """
    bootstrap.declare_rule(operator, text)


def launch(
    function: Callable[..., ResultT],
    devices: int,
    *args: object,
    start: Literal["fork", "spawn"] | None = None,
) -> list[ResultT]:
    """Runs `function(*args)` on new ranks of this machine, for a notebook or a plain `python` call.

    The function may be one of a notebook's cell. It sets the distribution and builds the model, as
    a script for `torchrun` does. What the ranks print appears here as they print it.

    On a machine without a GPU, ranks are forked from this process: they have all of it without a
    copy, and compute on one CPU thread each. Where torch sees a GPU, they are new interpreters,
    each on its GPU: a forked process could not use one. They take over the function and what it
    reads, the settings, custom objects and seeds of Keras, the installation of shardcore, and the
    state of random generators.

    Args:
        function: The program of each rank. What it returns is picklable: numbers, arrays, paths of
            files that it saved.
        devices: The number of ranks, one device each.
        *args: The arguments of the function.
        start: "fork" or "spawn", to start ranks the one way or the other.

    Returns:
        What the function returned on each rank, in the order of ranks.

    Raises:
        ArgumentProblem: If `function` is no function, or `devices` no whole number.
        MeshError: If `devices` is below 1.
        RankFailed: If a rank failed, or its result cannot be sent: it has the traceback of that
            rank. All ranks have ended then; so they have after an interrupt.
        EnvironmentProblem: If this process is a rank itself, or if new interpreters cannot be sent
            what the function reads, such as a model: it names the variable.

    Example:
        >>> shardcore.launch(lambda base: base + 1, 2, 10)
        [11, 11]
    """
    __tracebackhide__ = True  # IPython leaves this frame out
    try:
        return launching.launch(function, devices, args, start)
    except (RankFailed, KeyboardInterrupt) as ended:  # our frames say nothing of either
        raise ended.with_traceback(None) from None


def _sessions() -> "Sessions":
    sessions: Sessions = bootstrap.installation().binding.sessions
    return sessions
