"""The operator of functional collectives that a trace leaves out, known by its schema."""

import torch
from torch.distributed import _functional_collectives  # noqa: F401 - it defines the wrapper

from shardcore.adapters.torch_private.collectives import is_autograd_wrapper


def test_one_operator_of_functional_collectives_wraps_for_autograd():
    names = [each.partition("::") for each in torch._C._dispatch_get_all_op_names()]
    found = [
        name
        for namespace, _, name in names
        if namespace == "_c10d_functional"
        and is_autograd_wrapper(getattr(torch.ops._c10d_functional, name).default)
    ]
    wrapper = "_wrap_tensor_autograd"  # torch 2.10 has none
    assert found == [name for _, _, name in names if name == wrapper]
