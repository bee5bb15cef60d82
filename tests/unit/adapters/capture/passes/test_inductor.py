"""Large products go to oneDNN, except on processors of Intel."""

import numpy as np
import pytest
import torch

from shardcore.adapters import torch_private
from shardcore.adapters.capture.passes.inductor import with_onednn_products
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import graph_of


def matrix(rows, columns, dtype=torch.float32):
    return torch.randn(rows, columns, dtype=dtype)


OPERANDS = {
    "contiguous": (matrix(256, 256), matrix(256, 256), True),
    "the second transposed": (matrix(256, 300), matrix(400, 300).T, True),
    "the second in part": (matrix(256, 300), matrix(300, 500)[:, 7:307], True),
    "one in a batch": (matrix(256, 300)[None], matrix(400, 300).T[None], True),
    "the first transposed": (matrix(300, 256).T, matrix(300, 400), False),
    "three in a batch": (torch.randn(3, 256, 300), torch.randn(3, 300, 400), False),
    "small": (matrix(256, 256), matrix(256, 255), False),
    "doubles": (matrix(256, 256, torch.float64), matrix(256, 256, torch.float64), False),
}


@pytest.mark.skipif(not torch_private.has_onednn(), reason="oneDNN is not there")
@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("is_intel", [False, True])
def test_large_products_go_to_onednn_except_on_intel(which, is_intel, monkeypatch):
    monkeypatch.setattr(torch_private, "is_intel", lambda: is_intel)
    left, right, is_taken = OPERANDS[which]
    recorder = Recorder([left, right])
    recorder.run(lambda: (left @ right) if left.dim() == 2 else torch.bmm(left, right))
    onednn = torch_private.OneDnn()
    trace = with_onednn_products(recorder.trace, onednn)
    (call,) = trace.calls
    assert (call.operator is onednn.product()) == (is_taken and not is_intel)
    (made,) = graph_of(trace, {})(left, right)
    np.testing.assert_allclose(made, left.double() @ right.double(), rtol=1e-4, atol=1e-4)
    assert made.stride() == torch.matmul(left, right).stride()
