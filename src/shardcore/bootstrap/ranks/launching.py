"""Starts processes of this machine: ranks for `launch`, and one that plans.

A process is forked where it can compute as this one can: it has all of it without a copy. Else it
is a new interpreter, which gets a copy of what it needs.
"""

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, SupportsIndex, TypeVar

import attrs

from shardcore.bootstrap.ranks.sending import StartMessage, keras_state
from shardcore.domain.errors import ArgumentProblem, EnvironmentProblem, ShardcoreError
from shardcore.domain.ranks.job import resolve_job

if TYPE_CHECKING:
    from shardcore.adapters.ranks.job.started_ranks import Case
    from shardcore.adapters.ranks.launch.payload import Rules

_Result = TypeVar("_Result")
StartMethod = Literal["fork", "spawn"]

_REMEDY = (
    "Build it in the function; to go on with its weights, save it with model.save(path) and load "
    "that file in the function."
)
# Of a process that plans: it computes nothing, and may fork.
_WITHOUT_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "KERAS_TORCH_DEVICE": "cpu"}


def launch(
    function: Callable[..., _Result],
    devices: int,
    arguments: tuple[object, ...],
    start: StartMethod | None,
) -> list[_Result]:
    """Runs a function on new ranks: see `shardcore.launch`."""
    from shardcore.adapters.ranks.job import forked_ranks
    from shardcore.adapters.ranks.job.started_ranks import Case
    from shardcore.adapters.ranks.launch.new_ranks import fork_can_compute, has_devices

    _check_call(function, devices, "launch(function)", "launch(devices)")
    _check_start(start)
    case = Case(function, arguments, passes_rank=False)
    if start == "spawn" or (start is None and (has_devices() or not fork_can_compute())):
        return _spawn("launch()", case, devices, _rank_rules())
    if start == "fork" and not fork_can_compute():
        raise EnvironmentProblem(
            "launch(start='fork') forks this process, and torch was used in it in a way that no "
            "forked process can go on with: for CUDA, as the import of Keras does, or for a "
            "backward pass on a host with a GPU. Leave start= out: it starts new interpreters."
        )
    return forked_ranks.run(attrs.evolve(case, function=_with_state(function)), devices)


def run_ranks(case: "Case[_Result]", world_size: int) -> list[_Result]:
    """Runs a case on ranks that are forked, or on new interpreters if those could not compute."""
    from shardcore.adapters.ranks.job import forked_ranks
    from shardcore.adapters.ranks.launch.new_ranks import fork_can_compute

    _check_call(case.function, world_size, "run_ranks(fn)", "run_ranks(world_size)")
    if fork_can_compute():
        return forked_ranks.run(case, world_size)
    return _spawn("run_ranks()", case, world_size, _rank_rules())


def run_separately(call: str, function: Callable[..., _Result], *arguments: object) -> _Result:
    """Runs a function in a separate process, which uses no device.

    The next layers get the same names there as in this process.

    Args:
        call: The call that needs it, for an error.
        function: It computes shapes, and no values. It may fork its process.
        *arguments: Its arguments.

    Raises:
        ShardcoreError: What the function raises.
    """
    from shardcore.adapters.ranks.job import forked_ranks
    from shardcore.adapters.ranks.job.started_ranks import Case
    from shardcore.adapters.ranks.launch.payload import Rules

    work = partial(result_or_error, function)
    case = Case(work, arguments, keeps_session=True, passes_rank=False)
    if fork_can_trace():
        (result,) = forked_ranks.run(case, 1)
    else:
        (result,) = _spawn(call, case, 1, Rules(moves_tensors=True), _WITHOUT_DEVICES)
    if isinstance(result, ShardcoreError):
        raise result
    return result


def fork_can_trace() -> bool:
    """Tells whether a process that is forked from this one can simulate ranks.

    It could not leave a job that this one has joined: torch's threads for it are not forked.
    """
    from shardcore.adapters.ranks.job import process_group
    from shardcore.adapters.ranks.launch.new_ranks import fork_can_compute

    return fork_can_compute() and not process_group.is_started()


def result_or_error(
    function: Callable[..., _Result], *arguments: object
) -> _Result | ShardcoreError:
    """Calls `function`; returns its error for the process that started this one to raise."""
    try:
        return function(*arguments)
    except ShardcoreError as error:
        return error


def _spawn(
    call: str,
    case: "Case[_Result]",
    world_size: int,
    rules: "Rules",
    environment: Mapping[str, str] | None = None,
) -> list[_Result]:
    from shardcore.adapters.ranks.job.forked_ranks import workspace_for
    from shardcore.adapters.ranks.launch import new_ranks, process_state

    with workspace_for(world_size) as workspace:
        process_state.release()
        StartMessage.write(call, case, workspace, rules)
        return new_ranks.run(workspace, world_size, case.timeout, environment or {})


def _rank_rules() -> "Rules":
    """Refuses, in what ranks are sent, parts of Keras whose tensors belong to this process."""
    from shardcore.adapters.ranks.launch.payload import Rules

    if "keras" not in sys.modules:
        return Rules()
    from shardcore.binding.keras_private.process import why_not_sent

    return Rules(why_not_sent, _REMEDY)


def _with_state(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wraps the function for a forked rank, whose session of Keras is a new one.

    Python seeds its generator again in a forked process; ranks are to draw the same.
    """
    from shardcore.adapters.ranks.launch.process_state import ProcessState

    state, keras = ProcessState.now(), keras_state()

    def call(*arguments: object) -> _Result:
        if keras is not None:
            keras.restore()
        state.restore()
        return function(*arguments)

    return call


def _check_call(function: object, ranks: object, function_name: str, ranks_name: str) -> None:
    if not callable(function):
        raise ArgumentProblem(
            name=function_name,
            expected="a function",
            got=repr(function),
            remedy="give the function itself, not what it returns; its arguments come last",
        )
    if isinstance(ranks, bool) or not isinstance(ranks, SupportsIndex):
        raise ArgumentProblem(
            name=ranks_name,
            expected="a whole number of ranks",
            got=repr(ranks),
            remedy="give one rank for each device, such as 2",
        )


def _check_start(start: object) -> None:
    if start not in (None, "fork", "spawn"):
        raise EnvironmentProblem(
            f"launch() takes start='fork', start='spawn', or no start=; got start={start!r}.",
            name="launch(start)",
            got=repr(start),
        )
    job = resolve_job(environ=os.environ)
    if job is not None:
        raise EnvironmentProblem(
            f"launch() starts ranks, and this process is rank {job.rank} of {job.world_size} "
            "already: call the function itself."
        )
