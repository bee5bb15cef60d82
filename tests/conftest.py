"""Settings that every test shares."""

import os
import warnings

import pytest
from hypothesis import settings

# Before anybody imports Keras: the backend that this project is about.
os.environ["KERAS_BACKEND"] = "torch"

# A loaded machine is no reason to fail: hypothesis measures no time here.
settings.register_profile("shardcore", deadline=None)
settings.load_profile("shardcore")


@pytest.fixture(scope="session")
def loaded_inductor():
    """Imports Inductor, and finds the instructions that it compiles for: forked ranks inherit both.

    Each rank would import 500 modules, and would compile and load six small programs.
    """
    # The pool of compiling processes must not be forked.
    os.environ["TORCH_WARM_POOL"] = "0"
    with warnings.catch_warnings():
        # torch 2.13 uses its deprecated `torch.jit` in this import.
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()
