"""Refusals of `load_orbax` without the package `orbax-checkpoint`; `make orbax` reads folders."""

from importlib.util import find_spec

import pytest

import shardcore
from shardcore.domain.errors import CheckpointError, EnvironmentProblem
from shardcore.testing import run_ranks
from tests.distributed.files.files_of_others import bits_of, build, distribute


@pytest.mark.skipif(find_spec("tensorstore") is not None, reason="the package is installed")
def test_a_missing_package_is_named_on_all_ranks(tmp_path):
    for step in (2, 10):
        (tmp_path / str(step) / "pytree").mkdir(parents=True)
        (tmp_path / str(step) / "pytree" / "_METADATA").write_text("{}")

    def read(_rank):
        distribute((1, 2))
        model = build()
        before = bits_of(model)
        with pytest.raises(EnvironmentProblem, match="needs the package 'orbax-checkpoint'"):
            shardcore.load_orbax(model, tmp_path)
        with pytest.raises(CheckpointError, match="has no file 'pytree/_METADATA'"):
            shardcore.load_orbax(model, tmp_path / "none")
        assert bits_of(model) == before

    run_ranks(read, 2)
