"""Tensors without values leave autograd as it is."""

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import torch
from shardcore.adapters.torch_private import WithoutValues
from shardcore.testing import run_ranks

def gradient(_):
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    return x.grad.tolist()

with WithoutValues():
    torch.ones(2)
gradient(0)
print(run_ranks(gradient, 1, init=False))
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="autograd has a thread for it")
def test_processes_run_backward_passes_that_are_forked_after_one():
    """A torch for CUDA counts eight GPUs after the first tensors without values; others do not."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert ran.stdout == "[[2.0, 2.0]]\n", ran.stderr
