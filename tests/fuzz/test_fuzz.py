"""A sample of random programs has the numbers of one device, and programs that found something do.

`make fuzz` runs more.
"""

import attrs
import keras
import pytest

from tests import warm
from tests.fuzz import layers, search
from tests.fuzz.found import FOUND
from tests.fuzz.programs import Event, Layer, Program, read
from tests.fuzz.running import Verdict, verdicts

warm.load()  # the ranks are forked from this process

SEEDS = range(12)
TWO_RANKS = {2: (2, 1), 3: (1, 2), 4: (1, 2)}


def on_two_ranks(program):
    """The program over two ranks, which take less time than three or four."""
    mesh = program.mesh if program.ranks == 2 else TWO_RANKS[program.ranks]
    return attrs.evolve(program, mesh=mesh)


def test_programs_have_the_numbers_of_one_device():
    programs = {f"seed {seed}": on_two_ranks(search.drawn(seed)) for seed in SEEDS} | FOUND
    found = verdicts(programs.values())
    differing = {
        name: (found[program].why, program)
        for name, program in programs.items()
        if found[program].kind == "differed"
    }
    assert differing == {}
    assert sum(verdict.kind == "passed" for verdict in found.values()) > len(programs) / 2
    assert sum(verdict.captured for verdict in found.values()) > 0


def test_a_layer_with_other_numbers_over_a_mesh_is_found(monkeypatch):
    def wrong(x, size, variant):
        is_distributed = keras.distribution.distribution() is not None
        return keras.layers.Rescaling(1.001 if is_distributed else 1.0)(x)

    monkeypatch.setitem(layers.BUILDERS, "dropped", wrong)
    right = Program(layers=(Layer("dense"),))
    other = attrs.evolve(right, layers=(Layer("dropped"),))
    found = verdicts([right, other])
    assert found[right].kind == "passed"
    assert found[other].kind == "differed"
    assert "differs by" in found[other].why


def test_an_error_over_a_mesh_alone_is_found_and_one_of_shardcore_is_a_refusal(monkeypatch):
    program = Program(layers=(Layer("dropped"),))

    def verdict_of(error):
        def raising(x, size, variant):
            if keras.distribution.distribution() is not None:
                raise error
            return x

        monkeypatch.setitem(layers.BUILDERS, "dropped", raising)
        return verdicts([program])[program]

    from shardcore.domain.errors import MeshError

    assert verdict_of(TypeError("planted")).kind == "differed"
    assert verdict_of(MeshError("planted")).kind == "refused"


def test_a_program_is_made_small(monkeypatch):
    """It differs if it has a layer of one kind and fits after it has predicted."""

    def judged(programs):
        return {
            program: Verdict("differed" if is_wrong(program) else "passed") for program in programs
        }

    def is_wrong(program):
        kinds = [event.kind for event in program.events]
        fits_late = "predict" in kinds and "fit" in kinds[kinds.index("predict") :]
        return fits_late and any(layer.kind == "normed" for layer in program.layers)

    monkeypatch.setattr(search, "verdicts", judged)
    program = Program(
        inputs="series",
        layers=(Layer("dense", size=7), Layer("normed", variant=3), Layer("recurrent")),
        events=(Event("fit"), Event("predict", rows=8), Event("write"), Event("fit", times=3)),
        mesh=(2, 2),
        layout=("last", "first", "middle"),
        optimizer="Adam",
    )
    small, _ = search.smallest(program, Verdict("differed"), seconds=60)
    assert small == Program(layers=(Layer("normed"),), events=(Event("predict"), Event("fit")))


def test_a_seed_has_one_program_which_its_text_gives_back():
    for seed in range(5):
        program = search.drawn(seed)
        assert read(str(program)) == program == search.drawn(seed)


@pytest.mark.parametrize("text", ["Program(layers=(Layer(kind='dense'),))", "Program()"])
def test_a_program_shows_what_is_not_the_default(text):
    assert str(read(text)) == text
