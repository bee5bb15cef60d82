"""The log of an installation and of a variable."""

import io
import logging
import os
import sys

import keras
import pytest

import shardcore
from shardcore.testing import run_ranks


def build_sharded():
    shardcore.install("dtensor")
    mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map))
    keras.layers.Dense(4, name="up").build((None, 3))


@pytest.mark.parametrize(
    ("words", "ranks"), [("debug", {0}), ("debug,all-ranks", {0, 1}), ("variables", {0})]
)
def test_the_log_traces_a_variable(words, ranks):
    def program(rank):
        os.environ["SHARDCORE_LOG"] = words
        sys.stderr = io.StringIO()
        build_sharded()
        return sys.stderr.getvalue().splitlines()

    for rank, lines in enumerate(run_ranks(program, 2)):
        if rank not in ranks:
            assert lines == []
            continue
        begin = f"[shardcore rank {rank}] "
        expected = [
            f"{begin}distribution set: ModelParallel over mesh (data=1, model=2)",
            f"{begin}variable up/kernel: shape (3, 4), rule '.*kernel', spec (None, 'model'), "
            "placements [R, S(1)], local shape (3, 2)",
            f"{begin}variable up/bias: shape (4,), rule None, spec (None,), "
            "placements [R, R], local shape (4,)",
        ]
        if "debug" in words:
            assert lines[0].startswith(f"{begin}strategy 'dtensor' chosen")
            assert lines[1:] == expected
        else:
            assert lines == expected[1:]


def test_the_logging_module_s_own_configuration_is_respected():
    def program(rank):
        os.environ.pop("SHARDCORE_LOG", None)
        sys.stderr = io.StringIO()
        own = io.StringIO()
        logging.getLogger().handlers[:] = []
        logging.basicConfig(stream=own, format="%(name)s %(levelname)s %(message)s", force=True)
        logging.getLogger("shardcore.variables").setLevel(logging.DEBUG)
        build_sharded()
        return own.getvalue(), sys.stderr.getvalue()

    for own, stderr in run_ranks(program, 2):
        assert "shardcore.variables DEBUG variable up/kernel: shape (3, 4)" in own
        assert "distribution set" not in own
        assert stderr == ""


def test_by_default_rank_0_logs_news_and_no_usual_start():
    def program(rank):
        logging.getLogger().handlers[:] = []
        os.environ.pop("SHARDCORE_LOG", None)
        sys.stderr = io.StringIO()
        build_sharded()
        before = sys.stderr.getvalue()
        logging.getLogger("shardcore.install").info("news")
        return before, sys.stderr.getvalue()

    assert run_ranks(program, 2, init=False) == [("", "[shardcore rank 0] news\n"), ("", "")]
