"""What is planned without a search is what DTensor's search finds, and it finds no more."""

import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from shardcore.adapters.torch_compat.dtensor import direct, operator_table
from shardcore.testing import run_ranks

aten = torch.ops.aten
SHAPES = [(), (1,), (6,), (8, 6), (8, 1), (1, 6), (3, 6), (4, 8, 6), (4, 1, 6), (5, 7)]
CASES = 40


def _spec(draw, mesh, shape, dtype=torch.float32):
    choices = [Replicate(), *map(Shard, range(len(shape)))]
    placements = tuple(draw.choice(choices) for _ in range(mesh.ndim))
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(meta.shape, meta.stride(), dtype))


def _one(operator, *rest):
    return lambda draw, mesh: (operator, (_spec(draw, mesh, draw.choice(SHAPES)), *rest))


def _several(operator, number, in_place=False):
    def draw_case(draw, mesh):
        shape = draw.choice(SHAPES)
        shapes = [_broadcast_to(draw, shape) for _ in range(number)]
        if in_place:
            shapes[0] = shape
        return operator, tuple(_spec(draw, mesh, each) for each in shapes)

    return draw_case


def _broadcast_to(draw, shape):
    """A shape that is broadcast to `shape`, which it is as often as not."""
    if draw.random() < 0.5:
        return shape
    return tuple(draw.choice((1, size)) for size in shape[draw.randrange(len(shape) + 1) :])


def _lists(operator, number, *rest):
    def draw_case(draw, mesh):
        shapes = [draw.choice(SHAPES) for _ in range(3)]
        lists = [[_spec(draw, mesh, shape) for shape in shapes] for _ in range(number)]
        if draw.random() < 0.5:  # as an optimizer's: a variable and its slots lie alike
            lists = [lists[0]] * number
        return operator, (*lists, *rest)

    return draw_case


ELEMENTWISE = {
    "add": _several(aten.add.Tensor, 2),
    "mul in place": _several(aten.mul_.Tensor, 2, in_place=True),
    "addcmul": _several(aten.addcmul.default, 3),
    "div by a number": _one(aten.div.Scalar, 2.0),
    "relu": _one(aten.relu.default),
    "clone": _one(aten.clone.default),
    "detach": _one(aten.detach.default),
    "zeros_like": _one(aten.zeros_like.default),
    "lists": _lists(aten._foreach_mul.List, 2),
    "lists in place": _lists(aten._foreach_add_.List, 2),
    "list and a number": _lists(aten._foreach_mul_.Scalar, 1, 0.5),
    "roots": _lists(aten._foreach_sqrt.default, 1),
}
# They are planned at once if all operands are replicated, and only then.
OTHERS = {
    "sum": _one(aten.sum.default),
    "norms": _lists(aten._foreach_norm.Scalar, 1, 2),
    "mean": _one(aten.mean.default),
    "matmul": lambda draw, mesh: (
        aten.mm.default,
        (_spec(draw, mesh, (8, 6)), _spec(draw, mesh, (6, 4))),
    ),
    "transpose": lambda draw, mesh: (aten.t.default, (_spec(draw, mesh, (8, 6)),)),
    "topk": lambda draw, mesh: (aten.topk.default, (_spec(draw, mesh, (8, 6)), 2)),
    "layer norm": lambda draw, mesh: (
        aten.native_layer_norm.default,
        (_spec(draw, mesh, (8, 6)), [6], _spec(draw, mesh, (6,)), _spec(draw, mesh, (6,)), 1e-5),
    ),
}


def _told(found):
    if isinstance(found, DTensorSpec):
        return found.placements, tuple(found.shape), tuple(found.stride), found.tensor_meta.dtype
    return None if found is None else [_told(each) for each in found]


def _specs(args):
    lists = [each if isinstance(each, list) else [each] for each in args]
    return [each for some in lists for each in some if isinstance(each, DTensorSpec)]


def _planned(seed, mesh_shape):
    """By kind of operator: the cases, how many were planned at once, and what was wrong."""
    mesh = init_device_mesh("cpu", mesh_shape)
    planner = DTensor._op_dispatcher.sharding_propagator
    counts, wrong = {}, []
    for name, case in {**ELEMENTWISE, **OTHERS}.items():
        draw = random.Random(f"{name} {seed}")
        counts[name] = 0
        for _ in range(CASES):
            operator, args = case(draw, mesh)
            schema = OpSchema(operator, args, {})
            ours = direct.direct_sharding(schema)
            try:
                theirs = planner.propagate_op_sharding_non_cached(schema)
            except RuntimeError:  # it writes into an operand that would have to move
                theirs = OutputSharding(None, schema)
            moves = theirs.redistribute_schema is not None
            if ours is not None:
                counts[name] += 1
                same = _told(ours.output_spec) == _told(theirs.output_spec)
                if moves or not same:
                    wrong.append(f"{schema}: {ours.output_spec}, not {theirs}")
            elif not moves and name in ELEMENTWISE:
                wrong.append(f"{schema}: not planned at once, though {theirs}")
            if name in OTHERS and (ours is not None) != all(
                spec.is_replicated() for spec in _specs(args)
            ):
                wrong.append(f"{schema}: {ours}")
    return counts, wrong


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_what_is_planned_at_once_is_what_the_planner_finds(mesh):
    ranks = 4 if mesh == (2, 2) else 2
    found = run_ranks(lambda rank: _planned(rank, mesh), ranks, timeout=300)
    for _, wrong in found:  # each rank draws other cases
        assert not wrong, "\n".join(wrong[:5])
    counts = {name: sum(each[name] for each, _ in found) for name in {**ELEMENTWISE, **OTHERS}}
    assert all(counts.values()), counts
    assert counts["add"] < CASES * ranks, "none was left to the planner"


def test_an_optimizers_lists_are_not_searched():
    """The planner is not asked where a variable, its gradient and its slots lie alike."""

    def program(rank):
        mesh = init_device_mesh("cpu", (2,))
        planner = type(DTensor._op_dispatcher.sharding_propagator)
        asked = []
        planner.propagate_op_sharding_non_cached = lambda _, schema: asked.append(schema)
        table = operator_table.OperatorTable({}, *[lambda *_: None] * 3)
        tensors = [distribute_tensor(torch.ones(4, n), mesh, [Shard(0)]) for n in range(1, 4)]
        table.enter()
        torch._foreach_mul_(tensors, 0.5)
        torch._foreach_add_(tensors, tensors)
        doubled = torch._foreach_mul(tensors, torch._foreach_sqrt(tensors))
        return asked, [each.to_local().tolist() for each in (*tensors, *doubled)]

    for asked, values in run_ranks(program, 2):
        assert asked == []
        assert values == [[[1.0] * n] * 2 for n in (1, 2, 3)] * 2
