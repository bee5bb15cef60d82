"""Operands of operators, and the choices that the planner makes for them."""

from shardcore.domain.engine.call import PlacedTensor
from shardcore.domain.engine.choice import choose
from shardcore.domain.engine.rules import layers
from shardcore.domain.engine.rules.rule import rule as rule_of_text
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.placements import Partial, Replicate

ONE_GROUP = layers.Channels(1, 4, 6, transposed=False)
CONVOLUTION = layers.convolution(ONE_GROUP, 2, bias=True)
IMAGES, KERNEL, BIAS = (5, 4, 6, 6), (6, 4, 3, 3), (6,)
MATMUL = rule_of_text("n k, k m -> n m")
R, P = Replicate(), Partial()
PAIR = Mesh((2,), ("model",))
SQUARE = Mesh((2, 2), ("data", "model"))


def placed(shape, spec, mesh=PAIR, blocks=None, weight=False):
    layout = Layout(mesh, spec) if blocks is None else Layout(mesh, spec, blocks=blocks)
    return PlacedTensor(shape, layout, weight=weight)


def layouts_of(operands):
    return tuple(each.layout for each in operands)


def local_shapes(layout, shape):
    return [layout.local_shape(shape, rank) for rank in range(layout.mesh.size)]


def convolved(*placements, mesh=(2,), output=(5, 6, 6, 6)):
    """The sharding of a convolution: operands and result as words, and whether one is gathered."""
    mesh = Mesh(mesh, ("data", "model")[: len(mesh)])
    operands = tuple(
        PlacedTensor(shape, Layout.from_placements(mesh, each, len(shape)), weight=shape != IMAGES)
        for shape, each in zip((IMAGES, KERNEL, BIAS), placements, strict=True)
    )
    chosen = choose(CONVOLUTION, operands, (output,))
    layouts = (*chosen.operands, *chosen.results)
    return [" ".join(map(str, each.placements)) for each in layouts], chosen.gathers


def words(chosen):
    layouts = (*chosen.operands, *chosen.results)
    return [str(each.placement("model")) for each in layouts]
