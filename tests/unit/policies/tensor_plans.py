"""Plans by policy `tensor_parallel` over four ranks, and models that hypothesis draws for it."""

from hypothesis import strategies as st

from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies import tensor_parallel
from tests.unit.policies.facts import (
    dense,
    functional,
    norm,
    plain,
)  # fmt: skip

MESH = Mesh((2, 4), ("data", "model"))


def plan(model, mesh=MESH, small=0, **options):
    return tensor_parallel.plan(model, mesh, small=small, **options)


def reasons(model, **options):
    return {path: each.reason for path, each in plan(model, **options).items()}


@st.composite
def graphs(draw):
    """Functional models: a chain of layers of several widths, with gates, short cuts and reuse."""
    nodes = [plain("n0", "InputLayer")]
    widths, feeds = {"n0": 8}, []
    kinds = draw(
        st.lists(st.sampled_from(["dense", "dense", "ReLU", "Add", "LN", "BN"]), min_size=1)
    )
    for kind in [*kinds, "dense"]:
        name, previous = f"n{len(nodes)}", nodes[-1].name
        given = previous if draw(st.integers(0, 4)) else draw(st.sampled_from(nodes)).name
        width = draw(st.sampled_from([8, 16, 16, 30])) if kind == "dense" else widths[given]
        activation = "relu" if draw(st.integers(0, 7)) else "softmax"
        nodes.append(
            {
                "dense": dense(name, widths[given], width, activation),
                "LN": norm(name, width),
                "BN": norm(name, width, "BatchNormalization"),
            }.get(kind, plain(name, kind))
        )
        feeds.append((given, name))
        if kind == "Add" or (kind == "dense" and not draw(st.integers(0, 7))):  # called again
            others = [each for each in widths if widths[each] == widths[given]]
            feeds.append((draw(st.sampled_from(others)), name))
        widths[name] = width
    return functional(nodes, list(dict.fromkeys(feeds)))
