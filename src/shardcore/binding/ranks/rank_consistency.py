"""Consistency checks between ranks, before they run different steps."""

import hashlib
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from keras import Model, Variable

from shardcore.binding import keras_private
from shardcore.binding.keras_private.variables import storage_of, tensor_of
from shardcore.binding.ranks.session import Session
from shardcore.domain.errors import ArgumentProblem, CallProblem, RankMismatchError
from shardcore.domain.layouts.spec import named_axes
from shardcore.ports.world import Processes

Facts = dict[str, str]
# Elements, 8 MiB of them in `float64`.
_SUMMED_AT_ONCE = 2**20


def check_model(
    model: Model, data: object, session: Session, settings: Facts | None = None
) -> None:
    """Compares mesh, variables, layouts, copies and batch on all ranks, for the first step.

    Refuses a model that was laid out over another mesh. `settings` are compared too.
    """
    variables, inputs = list(variables_of(model)), batch_facts(data, session)
    facts = {
        "strategy": session.entry.name,
        "mesh": f"{session.mesh} over processes {session.world.processes}",
        **{f"variable {v.path}": _describe(v, session) for v in variables},
        "batch inputs": str(len(inputs)),
        **(settings or {}),
        **(inputs if session.distribution.auto_shard_dataset else {}),
    }
    compare(facts, session)
    if not session.distribution.auto_shard_dataset:
        _compare_rows(inputs, session)
    for variable in variables:
        own = storage_of(variable).session.world
        if own != session.world:
            raise CallProblem(
                f"Variable {variable.path!r} was laid out over mesh {own.mesh} of processes "
                f"{own.processes}, but the distribution that is set is over mesh {session.mesh} of "
                f"processes {session.world.processes}. Use the model in the scope of the "
                "distribution that it was built in; or move it: shardcore.distribute_model(model).",
                name=variable.path,
            )


def compare_values(variables: Iterable[Variable], session: Session) -> None:
    """Compares plain variables on all ranks.

    Raises:
        RankMismatchError: If a rank has other variables, or other values of one.
    """
    facts = {
        f"variable {number} ({v.path})": f"shape {tuple(v.shape)}, dtype {v.dtype}, values that "
        f"sum to {float(_sum(tensor_of(v).detach()))}"
        for number, v in enumerate(variables)
    }
    if facts and session.mesh.size > 1:
        compare(facts, session)


def compare(facts: Facts, session: Session, message: object = None) -> list[Any]:
    """Exchanges `message` and a hash of `facts`; if hashes differ, names the first other fact.

    Returns:
        The message of each rank.

    Raises:
        RankMismatchError: On every rank, if the facts differ.
    """
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
    gathered = session.processes.gather((digest, message))
    if len({rank_digest for rank_digest, _ in gathered}) > 1:
        _raise_first_difference(session.processes.gather(facts))
    return [rank_message for _, rank_message in gathered]


def agree(value: object, how: str, processes: Processes) -> Any:
    """Decides for all ranks from their values: `how` is "any", "all" or "rank 0"."""
    if how not in ("any", "all", "rank 0"):
        raise ArgumentProblem(
            name="agree(how)",
            expected='"any", "all" or "rank 0"',
            got=repr(how),
            remedy="say how the values of the ranks become one",
        )
    processes.initialize()
    is_of_rank_0 = how == "rank 0"
    sent = value if is_of_rank_0 and processes.rank == 0 else bool(value)
    everyone = processes.gather(sent, f"agree(..., {how!r})")
    if is_of_rank_0:
        return everyone[0]
    return any(everyone) if how == "any" else all(everyone)


def _raise_first_difference(everyone: list[Facts]) -> None:
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        values = [facts.get(name, "nothing") for facts in everyone]
        usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            others = [str(rank) for rank, value in enumerate(values) if value == usual]
            remedy = _REMEDIES.get(name.split()[0], _SAME_PROGRAM)
            raise RankMismatchError(
                f"Ranks disagree on {name}: rank {odd[0]} has {values[odd[0]]}, rank "
                f"{', '.join(others)} has {usual}. "
                f"{remedy}",
                name=name,
                expected=usual,
                got=values[odd[0]],
                remedy=remedy,
                rank=odd[0],
            )


def wait_for_new_trace(step: str, where: str, session: Session | None) -> None:
    """Waits until all ranks drop the trace of `step`; a rank that runs it would not answer.

    `where` names the state that has changed on this rank.
    """
    if session is None or session.mesh.size == 1:
        return
    try:
        session.processes.barrier(f"recording {step} again, as {where} has changed")
    except RankMismatchError as error:
        raise RankMismatchError(
            f"Rank {session.processes.rank} records {step} again, because {where} has changed "
            "since it was recorded; another rank does not. Python state must change on "
            "every rank, before the same step."
        ) from error


def _compare_rows(facts: Facts, session: Session) -> None:
    """Raises if processes at the same place of the batch axes have different rows."""
    axes = named_axes(session.batch_axes)
    position = session.mesh.position_along(session.batch_axes, session.world.position)
    first: dict[int, tuple[int, Facts]] = {}
    for process, (at, rows) in enumerate(session.processes.gather((position, facts))):
        other, expected = first.setdefault(at, (process, rows))
        for name in dict.fromkeys([*expected, *rows]):
            if rows.get(name) != expected.get(name):
                raise RankMismatchError(
                    f"Ranks {other} and {process} are at the same place {at} of {axes}, so they "
                    f"compute on the same rows, but disagree on {name}: rank {other} has "
                    f"{expected.get(name, 'nothing')}, rank {process} has "
                    f"{rows.get(name, 'nothing')}. With auto_shard_dataset=False, give the rows of "
                    "shard distribution.data_shard_id."
                )


_SAME_PROGRAM = "Every process must run the same program, with the same layout map and seed."
_REMEDIES = {
    "batch": "Give every process the same data (seed its shuffling), or its own rows with "
    "auto_shard_dataset=False.",
    "plain": "A plain tensor is the global batch: give every process the same one. If each process "
    "gives other rows, set auto_shard_dataset=False on the distribution: the model joins them, and "
    "shardcore.ensure_dtensor_input those of the targets.",
    "steps": "Give every process as many batches as the others.",
    "torch's": "The order of rows, and dropout without a seed, are drawn from it: all ranks must "
    "draw from it alike, with one seed (keras.utils.set_random_seed). For draws of one rank, use "
    "another torch.Generator.",
    "copy": "It is replicated: every rank must assign it (set_weights, load_weights and a "
    "learning rate too), with the same value, before the same step.",
}


def variables_of(model: Model) -> Iterable[Any]:
    """Lists the variables of the model, of its optimizer and of its metrics, each once."""
    optimizer = getattr(model, "optimizer", None)
    every = [
        *model.variables,
        *(getattr(model, "metrics_variables", None) or []),
        *(optimizer.variables if optimizer is not None else []),
    ]
    return {
        id(variable): variable for variable in every if tensor_of(variable) is not None
    }.values()


def _describe(variable: Variable, session: Session) -> str:
    layout = storage_of(variable).layout
    if layout is None:
        return "no layout"
    described = f"shape {tuple(variable.shape)}, dtype {variable.dtype}, layout {layout}"
    if not layout.is_replicated:
        return described
    return f"{described}, values that sum to {float(_sum(_local(variable, session)))}"


def _sum(local: torch.Tensor) -> torch.Tensor:
    """Sums a copy so that equal copies have bitwise equal sums: all ranks add in one order.

    It adds part by part, as torch copies the operand of a sum in `float64`.
    """
    parts = torch.split(local.reshape(-1), _SUMMED_AT_ONCE)
    return torch.stack([part.sum(dtype=torch.float64) for part in parts]).sum()


def _local(variable: Variable, session: Session) -> torch.Tensor:
    with torch.no_grad():
        local: torch.Tensor = session.strategy.to_local(tensor_of(variable))
    return local.detach()


def copies(model: Model, session: Session) -> Facts:
    """Sums the values of each replicated variable, except those of metrics, to be compared."""
    metrics = {id(variable) for variable in getattr(model, "metrics_variables", None) or []}
    replicated = [
        v for v in variables_of(model) if id(v) not in metrics and _is_replicated(v, session)
    ]
    parts = [(v.path, _local(v, session)) for v in replicated]
    copied = [(path, local) for path, local in parts if _is_equal_everywhere(local)]
    if not copied:
        return {}
    sums = torch.stack([_sum(local) for _, local in copied]).tolist()
    return {
        f"copy of {path}": f"values that sum to {total}"
        for (path, _), total in zip(copied, sums, strict=True)
    }


def _is_replicated(variable: Variable, session: Session) -> bool:
    storage = storage_of(variable)
    is_full = storage.layout is not None and storage.layout.is_replicated
    return is_full and storage.session.world == session.world


def _is_equal_everywhere(local: torch.Tensor) -> bool:
    """Tells whether copies are bitwise equal: a GPU may round equal gradients differently."""
    return local.device.type == "cpu" or local.ndim == 0 or not local.is_floating_point()


def batch_facts(data: object, session: Session) -> Facts:
    """Hashes each array of a batch, by its number; a sharded one counts by shape and layout."""
    leaves = [leaf for leaf in keras_private.leaves(data) if leaf is not None]
    return {f"batch input {n}": _content(leaf, session) for n, leaf in enumerate(leaves)}


def shapes(data: object) -> str:
    """Describes the nesting, shapes and dtypes of arrays.

    Example:
        >>> shapes(({"x": torch.zeros(4, 2)}, None))
        "({'x': (4, 2) float32}, None)"
    """
    return str(keras_private.map_leaves(_ShapeOf, data))


@attrs.frozen
class _ShapeOf:
    array: Any

    def __repr__(self) -> str:
        kind = getattr(self.array, "dtype", type(self.array).__name__)
        return f"{tuple(getattr(self.array, 'shape', ()))} {str(kind).removeprefix('torch.')}"

    __str__ = __repr__


def generators(session: Session) -> Facts:
    """Hashes the states of torch's generators, which have to be equal on all ranks."""
    states = {"torch's generator": torch.get_rng_state()}
    if session.processes.device_type == "cuda":
        states["torch's generator of the GPU"] = torch.cuda.get_rng_state()
    return {name: f"state {digest(state)[:12]}" for name, state in states.items()}


def digest(tensor: torch.Tensor) -> str:
    """Hashes the content of a plain tensor by SHA-256, equal in every process."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()  # one column has strides, flat or not
    content = flat.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


def _content(leaf: Any, session: Session) -> str:
    read = getattr(leaf, "_shardcore_content", None)
    if read is not None:
        leaf = read()
    if session.strategy.owns(leaf):
        layout = session.strategy.layout(leaf)
        if layout is None or not layout.is_replicated:
            return f"shape {_ShapeOf(leaf)}, layout {layout}"
        leaf = session.strategy.to_local(leaf)
    if isinstance(leaf, torch.Tensor):
        content = digest(leaf)
    else:
        in_bytes = getattr(leaf, "tobytes", lambda: repr(leaf).encode())()
        content = hashlib.sha256(in_bytes).hexdigest()
    return f"shape {_ShapeOf(leaf)}, content {content[:12]}"
