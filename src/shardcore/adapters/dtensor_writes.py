"""Operators that write into their operands, as on one device: into views of split dims too.

Known for torch 2.13.
"""

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from shardcore.adapters import dtensor_pending, dtensor_random, torch_compat
from shardcore.adapters.dtensor_placements import is_pending
from shardcore.adapters.dtensor_trust import DISTRUSTED, run_whole
from shardcore.adapters.dtensor_views import catch_up, is_copied_view, spread
from shardcore.adapters.torch_compat import dtensor as dtensor_compat
from shardcore.domain.errors import StrategyError


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into its first operand."""
    target = args[0]
    if not isinstance(target, DTensor):
        return run_whole(operator, args, kwargs)
    _prepare(target)
    result = _write_into(operator, args, kwargs)
    spread(target)
    return result


def _prepare(target: DTensor) -> None:
    if is_copied_view(target):
        catch_up(target)


def _write_into(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operator in dtensor_random.WRITES:
        return dtensor_random.WRITES[operator](operator, args, kwargs)
    if operator in dtensor_pending.WRITES and is_pending(args[0]):
        return dtensor_pending.WRITES[operator](operator, args, kwargs)
    if operator in DISTRUSTED and DISTRUSTED[operator]((args, kwargs)):
        return run_whole(operator, args, kwargs)
    before = args[0].placements
    try:
        result = dtensor_compat.as_torch_does(operator, args, kwargs)
    except dtensor_compat.NoPlanError:  # on all ranks, before anything is written
        return run_whole(operator, args, kwargs)
    after = args[0].placements
    assert after == before, f"{operator} changed {before} to {after}"
    return result


def _write_many(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into each of a list, such as the update of an optimizer."""
    if not any(map(is_copied_view, _targets(operator, args, kwargs))):
        return _write_all(operator, args, kwargs)
    for own_args, own_kwargs in _one_by_one(args, kwargs):
        _write_all(operator, own_args, own_kwargs)
    return None


def _write_all(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    targets = _targets(operator, args, kwargs)
    for each in targets:
        _prepare(each)
    result = dtensor_compat.as_torch_does(operator, args, kwargs)
    for each in targets:
        spread(each)
    return result


def _one_by_one(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls of an operator on lists, one for each element of them."""
    count = len(args[0])

    def only(at: int, value: Any) -> Any:
        return [value[at]] if isinstance(value, list) and len(value) == count else value

    for at in range(count):
        named = {name: only(at, value) for name, value in kwargs.items()}
        yield tuple(only(at, value) for value in args), named


def _write_out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator with `out=`."""
    targets = _targets(operator, args, kwargs)
    for each in targets:
        if is_copied_view(each):
            raise StrategyError(
                f"{operator} is to write into out=, a view of shape {tuple(each.shape)} of a dim "
                "that is split: such a view has memory of its own, and the write would not reach "
                "the tensor that it is a view of. Write view.copy_(result) instead."
            )
    result = dtensor_compat.as_torch_does(operator, args, kwargs)
    for each in targets:
        spread(each)
    return result


def _targets(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    written = torch_compat.written_operands(operator, args, kwargs)
    return [each for each in written if isinstance(each, DTensor)]


HANDLERS: dict[Any, torch_compat.Handler] = {
    **dict.fromkeys(torch_compat.writing_operators(), _write),
    **dict.fromkeys(torch_compat.list_writing_operators(), _write_many),
    **dict.fromkeys(dtensor_compat.out_operators(), _write_out),
}
