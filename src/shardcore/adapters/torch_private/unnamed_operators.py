"""Operators without public names: those that public functions of torch run, and one of oneDNN.

They are found by one run of the function, but for those of CUDA, which no run on a CPU finds. The
gradient of an operator is found by a call of its autograd node: a backward pass would start the
threads of autograd, after which a fork of this process could run none.
"""

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence

from shardcore.adapters.torch_private.dispatch_modes import OperatorListener

aten = torch.ops.aten


def _operators_of(function: Callable[[Any], Any], *shape: int) -> tuple[Any, ...]:
    """Runs `function` on a tensor of `shape`, and its gradient, and lists their operators."""
    operators: list[Any] = []
    # For any mode in which torch is imported.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        operand = torch.zeros(shape, device="cpu", dtype=torch.float32, requires_grad=True)
        with OperatorListener(lambda operator, *_: operators.append(operator)):
            result = function(operand)
            node: Any = getattr(result, "grad_fn", None)  # the stubs of torch forbid this call
            if node is not None:
                node(result.detach())
    return tuple(
        operator for operator in operators if operator is not torch.ops.aten.detach.default
    )


def _attention(x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(x, x, x)


def _masked_by_products(x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=x.detach())


CPU_ATTENTION, CPU_ATTENTION_BACKWARD = _operators_of(_attention, 1, 1, 1, 1)
ADAPTIVE_AVERAGES = (
    *_operators_of(lambda x: functional.adaptive_avg_pool2d(x, 2), 1, 1, 4, 4),
    *_operators_of(lambda x: functional.adaptive_avg_pool3d(x, 2), 1, 1, 4, 4, 4),
)
_OF_SOFTMAX = _operators_of(lambda x: x.softmax(0), 1)
_OF_LOG_SOFTMAX = _operators_of(lambda x: x.log_softmax(0), 1)
SOFTMAX, SOFTMAX_BACKWARD = zip(_OF_SOFTMAX, _OF_LOG_SOFTMAX, strict=True)
# Where all is masked, it gives zeros; its gradient is that of the softmax.
SAFE_SOFTMAX = next(
    operator
    for operator in _operators_of(_masked_by_products, 1, 1, 1, 1)
    if "softmax" in operator.name()
)
# Of Fourier: of real numbers, of complex ones, and to real ones.
TRANSFORMS = {
    operator
    for operator in _operators_of(
        lambda x: torch.fft.irfft(torch.fft.ifft(torch.fft.rfft(x.detach()))), 4
    )
    if "fft" in operator.name()
}
CONJUGATE = _operators_of(lambda x: torch.complex(x, x).detach().conj(), 1)[-1]
ITEM = _operators_of(lambda x: x.item())[0]
TO_COPY = _operators_of(lambda x: x.to(torch.float64), 1)[0]
# The last of three: a transpose, a copy and this.
UNSAFE_VIEW = _operators_of(lambda x: x.detach().t().reshape(4), 2, 2)[-1]
PACK = next(
    operator
    for operator in _operators_of(
        lambda x: pack_padded_sequence(x, torch.tensor([1])).data, 1, 1, 1
    )
    if "pack" in operator.name()
)
# The norms of a list of tensors.
LIST_NORM = _operators_of(lambda x: torch.nn.utils.get_total_norm([x.detach()], foreach=True), 1)[0]

# Of CUDA. torch 2.13: `scaled_dot_product_attention` chooses one of three by dtype, sizes, mask and
# device.
FLASH_ATTENTION = aten._scaled_dot_product_flash_attention.default
FLASH_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_ATTENTION = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_ATTENTION_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN_ATTENTION = aten._scaled_dot_product_cudnn_attention.default
CUDNN_ATTENTION_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
# `torch.lstm` and `torch.gru` choose it if cuDNN has the dtype.
CUDNN_RECURRENT = aten._cudnn_rnn.default
CUDNN_RECURRENT_BACKWARD = aten._cudnn_rnn_backward.default
# The gradient of `rms_norm`, which itself arrives as a composite.
RMS_NORM_BACKWARD = aten._fused_rms_norm_backward.default


class OneDnn:
    """A custom operator for products by oneDNN, registered until `close()`.

    Inductor calls a custom operator as it is.
    """

    def __init__(self) -> None:
        self._library: torch.library.Library | None = None

    def product(self) -> Any:
        """The product of two matrices of float32 on a CPU, or of two batches of one matrix each."""
        if self._library is None:
            self._library = torch.library.Library("shardcore", "DEF")  # type: ignore[no-untyped-call]
            self._library.define("product(Tensor left, Tensor right) -> Tensor")  # type: ignore[no-untyped-call]
            self._library.impl("product", _product, "CPU")  # type: ignore[no-untyped-call]
            self._library.impl("product", _form, "Meta")  # type: ignore[no-untyped-call]
        return torch.ops.shardcore.product.default

    def close(self) -> None:
        """Removes the operator from torch, with its library."""
        self._library = None


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # torch 2.13: oneDNN's product of float32 has no public name. This one takes any strides, also
    # a transposed operand; called by Inductor it would get a copy of the second.
    if left.dim() == 3:
        return _product(left[0], right[0])[None]
    linear = torch.ops.mkldnn._linear_pointwise.default
    made: torch.Tensor = linear(left, right.t(), None, "none", [], "")
    return made


def _form(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


def has_onednn() -> bool:
    """Checks the build, the processor and the release of torch.

    In torch 2.11 the operator ends the process if an operand is transposed or part of another
    matrix. torch 2.12 was not tried.
    """
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    return is_x86 and is_new and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.cache
def is_intel() -> bool:
    """Reads the vendor of the processor: MKL is optimized for Intel's."""
    described = Path("/proc/cpuinfo")  # of Linux
    return "GenuineIntel" in (described.read_text() if described.exists() else platform.processor())
