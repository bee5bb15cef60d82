"""The strategy's decisions, on a fake library that writes down what it is asked for."""

import attrs

from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.strategies.sharded import ShardedStrategy

MESH = Mesh((2, 2), ("data", "model"))
COLUMNS = Layout(MESH, (None, "model"))


@attrs.frozen
class Tensor:
    name: str
    layout: Layout | None = None


class Library:
    """Knows layouts and computes nothing."""

    def __init__(self):
        self.asked = []

    def owns(self, tensor):
        return tensor.layout is not None

    def __getattr__(self, name):
        def ask(*args):
            self.asked.append((name, *args))
            return (name, *args)

        return ask


def strategy():
    library = Library()
    return ShardedStrategy(library), library.asked


def test_an_output_without_a_rule_has_its_pending_sums_done():
    life, asked = strategy()
    pending = Tensor("x", Layout(MESH, (None,), {"model": "sum"}))
    life.redistribute(pending, None)
    assert asked == [("reduce_partial", pending)]


def test_an_output_with_a_rule_is_redistributed():
    life, asked = strategy()
    sharded = Tensor("x", Layout(MESH, ("data", None)))
    life.redistribute(sharded, COLUMNS)
    assert asked == [("redistribute", sharded, COLUMNS)]


def test_a_plain_output_with_a_rule_is_cut_without_communication():
    life, asked = strategy()
    plain = Tensor("x")
    life.redistribute(plain, COLUMNS)
    assert asked == [("shard", plain, COLUMNS)]


def test_a_variable_is_cut_and_its_gradients_are_tracked_in_the_same_layout():
    life, asked = strategy()
    stored = life.create(Tensor("w"), COLUMNS, None)
    life.redistribute_gradients(stored, COLUMNS)
    life.assign(stored, Tensor("new"))
    assert [call[0] for call in asked] == [
        "shard",
        "mark_weight",
        "redistribute_gradients",
        "copy_into",
    ]
    assert asked[2] == ("redistribute_gradients", stored, COLUMNS)
