"""The comparisons, section by section."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import attrs
from attrs import field, frozen

from benchmarks import (
    building,
    cases,
    contenders,
    generation,
    many_ranks,
    newcomer,
    operators,
    plans,
    rounds,
    rows,
    waiting,
    worlds,
)
from benchmarks.cases import Case
from benchmarks.contender import CAPTURED, INDUCTOR, JAX, KERAS, PEERS, SUMS, Contender, Goal
from benchmarks.rows import Row

FIRST_STEPS = 10
WARM_UP_SECONDS = 2.0
LAYERS = (6, 12, 24, 48)
CAPTURE_SECONDS = 5.0  # for so many layers:
CAPTURED_LAYERS = 24
COMPILED_LAYERS = (6, 24)
FEW_ROUNDS = 3  # of steps that take seconds where they run eagerly


@frozen
class Options:
    """The options of the command line.

    Attributes:
        quick: Small sizes, which only show that everything runs.
        rounds: How often each contender has its turn.
        strategy: What shardcore is installed with on two ranks.
        without: Contenders that are left out, by a part of their name.
        measured: Collects every measurement, for the file.
    """

    quick: bool
    rounds: int
    strategy: str
    without: tuple[str, ...] = ()
    measured: dict[str, Any] = field(factory=dict)

    def size(self, case: Case) -> Case:
        """The case, in the size that was asked for."""
        return cases.quick(case) if self.quick else case

    def race(
        self, section: str, case: Case, everybody: list[Contender], **how: Any
    ) -> tuple[list[Row], dict[str, rounds.Measured]]:
        """Measure those that take part; what was measured is kept."""
        racing = [each for each in everybody if not any(w in each.name for w in self.without)]
        found = rounds.run(case, racing, self.rounds, **how)
        self.measured[section] = [attrs.asdict(each) for each in found.values()]
        return list(rows.times(section, racing, found)), found


def one_process(options: Options) -> Iterator[Row]:
    """Keras, PyTorch and shardcore without distribution."""
    for case in map(options.size, (cases.MLP, cases.CNN, cases.DECODER)):
        section = f"{case.name}, one process"
        yield from options.race(section, case, contenders.on_one_process())[0]


def two_ranks(
    case: Case, *layouts: str, memory: bool = False
) -> Callable[[Options], Iterator[Row]]:
    """A model on two gloo ranks against the same layout written by hand, and against JAX."""

    def section(options: Options) -> Iterator[Row]:
        sized = options.size(case)
        for layout in layouts:
            racing = contenders.on_two_ranks(layout, options.strategy)
            name = f"{case.name}, {layout}"
            lines, found = options.race(name, sized, racing, memory=memory)
            yield from lines
            yield from rows.memory(name, PEERS[layout], found)

    return section


def small(options: Options) -> Iterator[Row]:
    """Small models, dominated by overhead: two ranks against one process."""
    case = options.size(cases.SMALL)
    for layout in ("data parallel", "megatron"):
        racing = [
            Contender(KERAS, contenders.keras(1, "whole", None)),
            *contenders.eager_and_captured(layout, options.strategy, (Goal(KERAS, 1.5),)),
        ]
        yield from options.race(f"{case.name}, {layout}", case, racing)[0]


def generate(options: Options) -> Iterator[Row]:
    """Times calls that add tokens to prompts: two ranks against one process."""
    of_small = (Goal(KERAS), Goal(f"{JAX}, data parallel", 3.0)), (Goal(KERAS), Goal(SUMS, 2.5))
    of_decoder = (Goal(KERAS, 1.0),), (Goal(KERAS, 1.0), Goal(SUMS))
    for case, goals in ((cases.SMALL, of_small), (cases.DECODER, of_decoder)):
        sized = attrs.evolve(options.size(case), steps=1)
        racing = [
            Contender(KERAS, contenders.generating(1, "whole", None)),
            *contenders.generating_on_jax(),
            contenders.sums_of_generating(options.strategy),
            *(
                Contender(
                    f"shardcore, {layout}",
                    contenders.generating(2, layout, options.strategy),
                    goals_of_layout,
                )
                for layout, goals_of_layout in zip(
                    ("data parallel", "megatron"), goals, strict=True
                )
            ),
        ]
        section = f"{case.name}, generate {generation.TOKENS} tokens"
        yield from options.race(section, sized, racing)[0]


def warm_up(options: Options) -> Iterator[Row]:
    """Times the first steps of a small model, and their excess over later ones."""
    section = f"{cases.NEWCOMER.name}, first {FIRST_STEPS} steps"
    racing = [
        Contender(KERAS, contenders.keras(1, "whole", None)),
        *contenders.on_two_ranks("data parallel", options.strategy),
    ]
    _, found = options.race(section, options.size(cases.NEWCOMER), racing, first_steps=FIRST_STEPS)
    plain = found[KERAS]
    for each in found.values():
        if each.failure:
            yield Row(section, each.name, note=each.failure)
        else:
            yield Row(section, each.name, each.warm_up, "s", KERAS, each.warm_up / plain.warm_up)
    if CAPTURED in found and not found[CAPTURED].failure:
        extra = found[CAPTURED].extra
        against = f"{WARM_UP_SECONDS:.0f} s"
        yield Row(
            section, f"{CAPTURED}: extra", extra, "s", against, extra / WARM_UP_SECONDS, limit=1.0
        )


def growth(options: Options) -> Iterator[Row]:
    """Tiny blocks, data parallel on two ranks: a step is nearly all host work."""
    options = attrs.evolve(options, rounds=min(options.rounds, FEW_ROUNDS))
    fewest: dict[str, rounds.Measured] = {}
    for layers in LAYERS[:2] if options.quick else LAYERS:
        case = cases.tiny_decoder(layers)
        racing = contenders.eager_and_captured("data parallel", options.strategy)
        section = f"{layers} tiny blocks, data parallel"
        lines, found = options.race(section, case, racing)
        fewest = fewest or found
        for row in lines:
            first = fewest[row.contender]
            known = row.value is not None and not first.failure
            ratio = row.value / first.step if known else None
            yield attrs.evolve(row, against=f"{LAYERS[0]} blocks", ratio=ratio)
        if CAPTURED in found and not found[CAPTURED].failure:
            yield _capture_time(section, layers, found[CAPTURED])


def _capture_time(section: str, layers: int, captured: rounds.Measured) -> Row:
    limit = 1.0 if layers == CAPTURED_LAYERS else None
    ratio = captured.extra / CAPTURE_SECONDS
    note = rows.RAN_IN_PYTHON if captured.layer_calls else ""
    return Row(
        section,
        "extra, first steps",
        captured.extra,
        "s",
        f"{CAPTURE_SECONDS:.0f} s",
        ratio,
        limit,
        note,
    )


def compiling(options: Options) -> Iterator[Row]:
    """Times the compilation of a step, and the loading of one that another process compiled."""
    options = attrs.evolve(options, rounds=min(options.rounds, FEW_ROUNDS))
    for layers in COMPILED_LAYERS[:1] if options.quick else COMPILED_LAYERS:
        case = cases.tiny_decoder(layers)
        section = f"{layers} tiny blocks, compiled"
        *_, captured = contenders.eager_and_captured("data parallel", options.strategy)
        inductor = contenders.inductor("data parallel", options.strategy, (Goal(CAPTURED),))
        with _empty_cache_of_torch():
            lines, found = options.race(section, case, [captured, inductor])
            _, later = options.race(f"{section} before", case, [inductor])
        yield from lines
        yield from _compile_times(section, found.get(INDUCTOR), later.get(INDUCTOR))


def _compile_times(
    section: str, first: rounds.Measured | None, later: rounds.Measured | None
) -> Iterator[Row]:
    if first is None or later is None or first.failure or later.failure:
        return
    fresh, loaded = "first steps, compiled", "first steps, loaded"
    yield Row(section, fresh, first.extra)
    yield Row(section, loaded, later.extra, against=fresh, ratio=later.extra / first.extra)


@contextlib.contextmanager
def _empty_cache_of_torch() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory(prefix="shardcore-bench-") as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        yield


def simulated(options: Options) -> Iterator[Row]:
    """Compares the bytes of a step with the closed formula, and the costs of few ranks and many."""
    for layout in PEERS:
        for ranks in (8,) if options.quick else (8, 1024, 4096):
            yield worlds.row(layout, ranks, options.strategy)
    yield from many_ranks.rows(options.quick, options.strategy)


def build(options: Options) -> Iterator[Row]:
    """The memory of a rank while a model of 1 GiB is built, loaded or quantized."""
    yield from building.rows(options.quick, options.strategy)


def preset(options: Options) -> Iterator[Row]:
    """The memory of a rank while keras-hub reads a preset of 1 GiB from a folder."""
    yield from building.preset_rows(options.quick, options.strategy)


def plan(options: Options) -> Iterator[Row]:
    """The order of layouts by predicted steps, beside that by measured ones."""
    yield from plans.rows(options.quick, options.strategy)


def waiting_for_input(options: Options) -> Iterator[Row]:
    """The share of an epoch in which the CPU draws batches and does not compute."""
    yield from waiting.rows(options.quick, options.strategy, "cpu")


def first_program(options: Options) -> Iterator[Row]:
    """The whole of a newcomer's program on two ranks, against Keras on one process."""
    yield from newcomer.rows(options.quick, options.strategy, options.rounds)


def single_operators(options: Options) -> Iterator[Row]:
    """The CPU time of single operators on small sharded tensors."""
    yield from operators.rows(options.quick, options.strategy, options.rounds)


def _cuda(options: Options) -> Iterator[Row]:
    from benchmarks import cuda  # which imports what is above

    return cuda.section(options)


SECTIONS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "one": one_process,
    "mlp": two_ranks(cases.MLP, *PEERS),
    "cnn": two_ranks(cases.CNN, "data parallel"),
    "decoder": two_ranks(cases.DECODER, *PEERS, memory=True),
    "small": small,
    "generate": generate,
    "warmup": warm_up,
    "newcomer": first_program,
    "operators": single_operators,
    "growth": growth,
    "compiling": compiling,
    "worlds": simulated,
    "build": build,
    "preset": preset,
    "plan": plan,
    "input": waiting_for_input,
    "cuda": _cuda,
}
