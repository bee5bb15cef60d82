"""Settings that every test shares."""

import os

import pytest
from hypothesis import settings

from tests.coverage_of_ranks import save_before_results

# Before anybody imports Keras: the backend that this project is about.
os.environ["KERAS_BACKEND"] = "torch"

# A loaded machine is no reason to fail: hypothesis measures no time here.
settings.register_profile("shardcore", deadline=None)
settings.load_profile("shardcore")


@pytest.fixture(scope="session")
def vector_instructions():
    """Finds the instructions that Inductor compiles for, once: forked ranks inherit them.

    Each rank would compile and load six small programs to find them.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


def pytest_configure():
    save_before_results()
