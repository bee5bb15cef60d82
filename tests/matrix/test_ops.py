"""Every public function of `keras.ops` gives the values and gradients of one device.

`SHARDCORE_MATRIX=full` runs all cases on all meshes; else those marked fast on one mesh axis. With
`SHARDCORE_MATRIX_DOCS` set too, the table in docs/coverage.md is written anew.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from shardcore.testing import run_ranks
from tests.matrix.coverage import Verdicts, merge, operator_table, with_table
from tests.matrix.ops_cases import CASES, public_functions
from tests.matrix.ops_run import run_cases
from tests.matrix.placing import MESHES

FULL = os.environ.get("SHARDCORE_MATRIX") == "full"
TIMEOUT = 3000 if FULL else 250
COVERAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
CHOSEN_MESHES = MESHES if FULL else dict(list(MESHES.items())[:1])
CHOSEN = {
    name: [case for case in cases if FULL or case.fast] for name, cases in sorted(CASES.items())
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdicts]:
    """What came of each function, per mesh."""
    return {
        name: merge(run_ranks(run_cases, mesh.size, mesh, CHOSEN, timeout=TIMEOUT))
        for name, mesh in CHOSEN_MESHES.items()
    }


def test_every_public_function_has_a_case():
    assert set(CASES) == set(public_functions())


@pytest.mark.parametrize("mesh", CHOSEN_MESHES)
def test_no_silent_difference(verdicts, mesh):
    wrong = [line for line in verdicts[mesh].lines if line.startswith("WRONG")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("mesh", CHOSEN_MESHES)
def test_every_error_is_documented(verdicts, mesh):
    text = COVERAGE.read_text()
    errors = {line for line in verdicts[mesh].lines if line.startswith("error")}
    undocumented = [line for line in errors if f"| `{line.split()[1]}` | error" not in text]
    assert not undocumented, "\n".join(sorted(undocumented))


def test_the_table_names_every_function(verdicts):
    counts: dict[str, Counter[str]] = {}
    for each in verdicts.values():
        for name, verdict in each.counts.items():
            counts.setdefault(name, Counter()).update(verdict)
    if os.environ.get("SHARDCORE_MATRIX_DOCS"):
        assert FULL, "the table is of all cases: set SHARDCORE_MATRIX=full"
        COVERAGE.write_text(with_table(COVERAGE.read_text(), operator_table(counts)))
    text = COVERAGE.read_text()
    missing = [name for name in public_functions() if f"| `{name}` |" not in text]
    assert not missing, f"run SHARDCORE_MATRIX=full SHARDCORE_MATRIX_DOCS=1: {missing}"
