"""A random program as data, and what hypothesis draws it from.

A value that comes first is the simplest: hypothesis shrinks towards it.
"""

from typing import Any

import attrs
from hypothesis import strategies as st

from tests.fuzz import events, layers, life, models

# The data axis first. Without a layout a mesh of one column is `DataParallel`.
TWO_RANKS = ((2, 1), (1, 2))
MORE_RANKS = ((2, 2), (3, 1), (1, 3), (4, 1), (1, 4))
# Which dim of a variable is sharded, and over which axes: see `running.spec_of`.
LAYOUTS = ("replicated", "last", "first", "last over data", "first over both", "middle")


@attrs.frozen
class Layer:
    """A layer of the model.

    Args:
        kind: A name in `layers.BUILDERS`.
        size: Its units or filters, if the kind has them.
        variant: Chooses among the forms of a kind.
    """

    kind: str
    size: int = 4
    variant: int = 0


@attrs.frozen
class Event:
    """Something that is done with the model, in the order of the program.

    Args:
        kind: A name in `events.EVENTS`.
        rows: The rows of its data.
        batch: The rows of a batch.
        times: Epochs, or steps.
        value: Chooses what it sets, and to what.
        callbacks: Names in `life.CALLBACKS`, for `fit`.
    """

    kind: str
    rows: int = 4
    batch: int = 4
    times: int = 1
    value: int = 0
    callbacks: tuple[str, ...] = ()


@attrs.frozen
class Program:
    """A model, its distribution, and what is done with it.

    Args:
        inputs: A kind of input: a name in `layers.KINDS`.
        layers: The layers between the input and the head.
        events: What is done, in this order.
        mesh: The shape of the mesh: data axis, model axis.
        layout: Names in `LAYOUTS`; the variables take them in turn.
        strategy: The name that `shardcore.install` gets.
        loss: A name in `models.LOSSES`.
        optimizer: A name in `models.OPTIMIZERS`.
        option: A name in `models.OPTIONS`, of the optimizer.
        step: A name in `models.STEPS`: whose training step it is.
        weighted: Whether the rows have weights.
        floatx: The float type of Keras.
        capture: "auto", "eager", or "audit": every second captured step is audited.
    """

    inputs: str = "vectors"
    layers: tuple[Layer, ...] = ()
    events: tuple[Event, ...] = (Event("train"),)
    mesh: tuple[int, int] = (2, 1)
    layout: tuple[str, ...] = ("replicated",)
    strategy: str = "dtensor"
    loss: str = "mse"
    optimizer: str = "SGD"
    option: str = "none"
    step: str = "keras"
    weighted: bool = False
    floatx: str = "float64"
    capture: str = "auto"

    @property
    def ranks(self) -> int:
        return self.mesh[0] * self.mesh[1]

    def __repr__(self) -> str:
        """Shows it as an expression, without the values that are the default."""
        return shown(self)


def shown(part: Any) -> str:
    """Returns a program or a part of it as an expression, without what is the default."""
    if isinstance(part, tuple):
        return f"({''.join(f'{shown(value)}, ' for value in part).rstrip()})"
    if not attrs.has(type(part)):
        return repr(part)
    given = (
        f"{field.name}={shown(value)}"
        for field in attrs.fields(type(part))
        if (value := getattr(part, field.name)) != field.default
    )
    return f"{type(part).__name__}({', '.join(given)})"


def read(text: str) -> Program:
    """Returns the program that a text shows."""
    program = eval(text, {part.__name__: part for part in (Layer, Event, Program)})
    assert isinstance(program, Program), text
    return program


def _mostly(usual: str, *others: str) -> st.SearchStrategy[str]:
    return st.sampled_from((usual, usual, usual, *others))


def _layers(inputs: str) -> st.SearchStrategy[Layer]:
    return st.builds(
        Layer,
        kind=st.sampled_from(layers.KINDS[inputs].layers),
        size=st.sampled_from((4, 2, 3, 6, 7)),
        variant=st.integers(0, 5),
    )


_EVENTS = st.builds(
    Event,
    kind=st.sampled_from(tuple(events.EVENTS)),
    rows=st.sampled_from((4, 8, 5, 7, 12, 3)),
    batch=st.sampled_from((4, 3, 2)),
    times=st.integers(1, 4),
    value=st.integers(0, 9),
    callbacks=st.lists(st.sampled_from(tuple(life.CALLBACKS)), max_size=2, unique=True).map(tuple),
)


@st.composite
def drawn_programs(draw: st.DrawFn) -> Program:
    """Draws a program."""
    inputs = draw(st.sampled_from(tuple(layers.KINDS)))
    return Program(
        inputs=inputs,
        layers=tuple(draw(st.lists(_layers(inputs), min_size=1, max_size=4))),
        events=tuple(draw(st.lists(_EVENTS, min_size=1, max_size=4))),
        mesh=draw(st.sampled_from(6 * TWO_RANKS + MORE_RANKS)),
        layout=tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4))),
        strategy=draw(st.sampled_from(("dtensor", "manual"))),
        loss=draw(st.sampled_from(tuple(models.LOSSES))),
        optimizer=draw(st.sampled_from(tuple(models.OPTIMIZERS))),
        option=draw(_mostly("none", *models.OPTIONS)),
        step=draw(_mostly("keras", *models.STEPS)),
        weighted=draw(st.booleans()),
        floatx=draw(_mostly("float64", "float32")),
        capture=draw(_mostly("auto", "audit", "audit", "eager")),
    )
