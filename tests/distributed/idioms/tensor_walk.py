"""Every public attribute and method of `torch.Tensor`, on a sharded tensor and on a plain one.

Arguments are the first of a list that one device takes without an error. Ranks write down each
call before they make it: what ends a process is known, and the walk goes on after it.
"""

import pickle
import warnings

import torch

from shardcore.adapters.engine.tensor import ShardedTensor
from shardcore.domain.errors import RankFailed, ShardcoreError
from shardcore.testing import run_ranks
from tests.distributed.idioms.running import make
from tests.distributed.programs import distribute

NAMES = [name for name in dir(torch.Tensor) if not name.startswith("_")]
# What has another meaning for a sharded tensor, or tells nothing about its values.
_REASONS = {
    "backward retain_grad register_hook register_post_accumulate_grad_hook": "needs a graph",
    "cuda xpu ipu mtia hpu pin_memory record_stream": "of other devices",
    "empty_like new_empty new_empty_strided": "unset memory",
    "names align_as align_to refine_names rename rename_": "torch's experiment with named dims",
    "eig lstsq solve symeig reinforce resize resize_as volatile": "no more in torch",
    "ccol_indices coalesce col_indices crow_indices indices is_coalesced row_indices smm values "
    "resize_as_sparse_ sparse_mask sparse_resize_ sparse_resize_and_clear_ sspaddmm to_mkldnn "
    "to_padded_tensor": "of sparse, nested and packed tensors, of which none is sharded",
    "int_repr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale qscheme "
    "q_zero_point": "of quantized tensors, of which none is sharded",
    "as_subclass module_load": "gives back an argument",
}
LEFT_OUT = {name for names in _REASONS for name in names.split()}


def _floats():
    return (torch.arange(16.0).reshape(4, 4) - 5.5) / 4


def _integers():
    return torch.arange(16).reshape(4, 4) % 7


def _positive():
    square = _floats()
    return square @ square.T / 8 + torch.eye(4)


def _batch():
    return torch.stack([_floats(), _floats().T])


SELVES = (_floats, _integers, _positive, lambda: _floats()[0], lambda: _floats() > 0, _batch,
          lambda: _floats().sum(), lambda: torch.complex(_floats(), _floats().T),
          lambda: _integers()[0], lambda: _floats().double(), lambda: _floats().abs(),
          lambda: _floats()[:, :3])  # fmt: skip
# Arguments that no other method takes, with the number of the tensor that takes them; a dict has
# those by name.
OF_ONE = {
    "addbmm": (0, lambda x: (_batch(), _batch())), "addbmm_": (0, lambda x: (_batch(), _batch())),
    "addmv": (3, lambda x: (_floats(), x)), "addmv_": (3, lambda x: (_floats(), x)),
    "as_strided_scatter": (0, lambda x: (x[:2, :2], (2, 2), (4, 1))),
    "baddbmm": (5, lambda x: (x, x)), "baddbmm_": (5, lambda x: (x, x)),
    "bincount": (8, lambda x: ()), "bmm": (5, lambda x: (x,)),
    "broadcast_to": (0, lambda x: ((2, 4, 4),)), "expand": (0, lambda x: (2, 4, 4)),
    "cross": (11, lambda x: (x.flip(0), 1)), "dsplit": (5, lambda x: (2,)),
    "float_power_": (9, lambda x: (2,)), "imag": (7, lambda x: ()),
    "is_nonzero": (6, lambda x: ()), "item": (6, lambda x: ()),
    "lu_solve": (0, lambda x: torch.linalg.lu_factor(_positive())),
    "map2_": (0, lambda x: (x, x, lambda a, b, c: a + b - c)),
    "map_": (0, lambda x: (x, lambda a, b: a + 2 * b)),
    "multinomial": (10, lambda x: (2,)), "new_full": (0, lambda x: ((2, 2), 3.0)),
    "ormqr": (0, lambda x: (x[0], x)),
    "select_scatter": (0, lambda x: (x[0], 0, 1)),
    "split_with_sizes": (0, lambda x: ((1, 3), 1)),
    "unsafe_split_with_sizes": (0, lambda x: ((1, 3), 1)),
    "istft": (7, lambda x: (6,)),
    "nonzero_static": (1, lambda x: ({"size": 20},)),
    "stft": (0, lambda x: (4, 2, 4, torch.ones(4), True, "constant", False, True, True)),
}  # fmt: skip


def arguments(x):
    """Tuples of arguments to try, in this order; tensors among them become sharded too."""
    other = x.flip(0) if x.ndim else x
    rows = torch.tensor([[0, 1, 2, 3], [2, 0, 3, 1], [1, 3, 0, 2], [3, 2, 1, 0]])
    return [
        (), (other,), (0,), (1,), (2,), (0, 1), (torch.float64,), (other, other), (0, 2),
        (0, rows[0]), (0, rows), (rows,), (x > 0, 2.0), (x > 0, other), (x > 0,),
        (0, rows, other), (0, rows[0], other), (rows, other), (0, 1, 2), (0.5,), (0, 0.5),
        (-1.0, 1.0), (2, 0, 1.0), (0, rows[0], 2.0), (2, 2), ((2, 8),), ((1, 0),), (1, 1, 2),
        ((1, 2),), ((4, 4), (1, 4)), (rows[:1, :1].reshape(1), 0), ("sum",), (rows, other, "sum"),
        (0, rows, other, "sum"), (0, rows[0], other, "mean"), ((rows[0],), other),
        (other, other, other), ((rows[0],), other[0]), (other[0], other[0]), (0, (2, 2)),
        (torch.tensor(2.0),), (x.new_ones(4),), (lambda value: value,), ("torch.DoubleTensor",),
    ]  # fmt: skip


def _called(name, x, args):
    """Returns what a name gives, and the tensor, which it may have written into."""
    torch.manual_seed(0)
    found = getattr(x, name)
    named = args[-1] if args and isinstance(args[-1], dict) else {}
    placed = args[:-1] if named else args
    return (found(*placed, **named) if callable(found) else found), x


def cases():
    """The first tensor and arguments that one device takes, for each name; and the names left."""
    warnings.simplefilter("ignore")  # torch's, of names that are no longer advised
    taken, left = [], []
    tensors = [build() for build in SELVES[:5]]
    tried = [(n, p) for n, x in enumerate(tensors) for p in range(len(arguments(x)))]
    for name in sorted(set(NAMES) - LEFT_OUT):
        if name in OF_ONE:
            taken.append((name, OF_ONE[name][0], -1))
            continue
        fits = next((case for case in tried if _is_taken(name, *case)), None)
        taken += [(name, *fits)] if fits else []
        left += [] if fits else [name]
    return taken, left


def _is_taken(name, number, place):
    x = SELVES[number]()
    try:
        _called(name, x, arguments(x)[place])
    except Exception:  # noqa: BLE001 - arguments of another method
        return False
    return True


def _arguments(name, number, place):
    x = SELVES[number]()
    return arguments(x)[place] if place >= 0 else OF_ONE[name][1](x)


def _sharded(leaf, layout):
    return make(leaf, layout) if isinstance(leaf, torch.Tensor) else leaf


def _plain(result):
    if isinstance(result, ShardedTensor):
        result = result.full_tensor()
    if isinstance(result, torch.Tensor):
        result = result.detach()
        return result.to_dense() if result.layout is not torch.strided else result
    if isinstance(result, tuple | list):
        return [_plain(each) for each in result]
    return result


def _differ(found, expected):
    if isinstance(expected, list):
        return len(found) != len(expected) or any(map(_differ, found, expected))
    if isinstance(expected, torch.Tensor):
        try:
            torch.testing.assert_close(found, expected, equal_nan=True)
        except (AssertionError, TypeError) as error:
            return str(error) or "differs"
        return ""
    is_value = isinstance(expected, bool | int | float | complex | str | torch.dtype | torch.Size)
    return is_value and found != expected


def problem(name, number, place, layout):
    """Returns what is wrong; empty for the result of one device, or our error."""
    build = SELVES[number]
    expected = _plain(_called(name, build(), _arguments(name, number, place)))
    args = [
        tuple(_sharded(leaf, layout) for leaf in each) if isinstance(each, tuple) else each
        for each in (_sharded(leaf, layout) for leaf in _arguments(name, number, place))
    ]
    try:
        found = _plain(_called(name, make(build(), layout), args))
    except ShardcoreError:
        return ""
    except Exception as error:  # noqa: BLE001 - any error that is not ours
        return f"{type(error).__name__}: {error}"[:300]
    differs = _differ(found, expected)
    return f"differs: {differs}: {found} is not {expected}"[:300] if differs else ""


def walk(todo, strategy, path):
    """The problems by case; each of `todo` is a name, its numbers and a layout."""
    problems = {}

    def program(rank, left):
        distribute((1, 2), strategy=strategy)
        warnings.simplefilter("ignore")
        with open(path / f"{rank}", "wb", buffering=0) as file:
            for case in left:
                pickle.dump((case, None), file)
                pickle.dump((case, problem(*case)), file)

    left = list(todo)
    while left:
        try:
            run_ranks(program, 2, left, timeout=120)
            is_over = True
        except RankFailed as failed:
            is_over, reason = False, str(failed)[:300]
        noted = dict(_read(path / "0"))
        problems |= {case: each for case, each in noted.items() if each}
        if is_over:
            return problems
        last = list(noted)[-1]
        problems[last] = f"ended the process: {reason}"
        left = left[left.index(last) + 1 :]
    return problems


def _read(path):
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return
