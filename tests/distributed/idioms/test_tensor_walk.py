"""Each name of `torch.Tensor` gives on a sharded tensor what it gives on a plain one, or our error.

Never other numbers, never the end of the process.
"""

import pytest

from shardcore.testing import run_ranks
from tests.distributed.idioms.running import LAYOUTS
from tests.distributed.idioms.tensor_walk import cases, walk


@pytest.fixture(scope="module")
def taken():
    """Each name, with arguments that a plain tensor takes."""
    ((taken, left),) = run_ranks(lambda rank: cases(), 1)
    assert not left, "give these arguments, or a reason to leave them out, in tensor_walk.py"
    return taken


def check(taken, layout, strategy, path):
    problems = walk([(*case, layout) for case in taken], strategy, path)
    assert not problems, "\n".join(f"{case}: {problem}" for case, problem in problems.items())


@pytest.mark.parametrize(("layout", "strategy"), [("last", "dtensor"), ("first", "manual")])
def test_each_name_of_a_tensor(taken, layout, strategy, tmp_path):
    check(taken, layout, strategy, tmp_path)


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_name_in_each_layout(taken, layout, strategy, tmp_path):
    check(taken, layout, strategy, tmp_path)
