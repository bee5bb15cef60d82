"""The attentions that torch has on CUDA only, as plain products, on a CPU.

They check what the ones of CUDA take, and give what those give, by torch's own shapes without
values.
"""

import math
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from tests import cuda_operators

aten = torch.ops.aten
KINDS = ("flash", "efficient", "cudnn")


def attend(kind, query, key, value, mask=None, causal=False, scale=None):
    """`scaled_dot_product_attention` as on CUDA, if torch chooses the operator `kind` there."""
    if kind == "flash":
        assert mask is None
        operator = aten._scaled_dot_product_flash_attention
        return operator(query, key, value, 0.0, causal, scale=scale)[0]
    if kind == "cudnn":
        operator = aten._scaled_dot_product_cudnn_attention
        return operator(query, key, value, mask, True, 0.0, causal, scale=scale)[0]
    if mask is not None:
        columns = mask.shape[-1]
        mask = pad(mask, (0, -columns % 8))[..., :columns]
        mask = mask.expand(*query.shape[:3], columns)
    operator = aten._scaled_dot_product_efficient_attention
    return operator(query, key, value, mask, True, 0.0, causal, scale=scale)[0]


def _scores(query, key, bias, causal, scale) -> tuple[torch.Tensor, float]:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(2, 3) * factor
    if bias is not None:
        scores = scores + bias
    if causal:
        assert query.shape[2] == key.shape[2]
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores, factor


def _forward(query, key, value, bias, causal, scale) -> tuple[torch.Tensor, torch.Tensor]:
    assert 0 not in (*query.shape, *key.shape)
    scores, _ = _scores(query, key, bias, causal, scale)
    sums = scores.logsumexp(-1)
    output = (scores - sums.unsqueeze(-1)).exp() @ value
    return torch.empty_like(query).copy_(output), sums.float()


def _without_masked_rows(scores, output, sums) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros where the powers of 2 of all scores are zero, as an H200 gives them."""
    none = (scores * math.log2(math.e)).amax(-1) == -math.inf
    return output.masked_fill(none.unsqueeze(-1), 0), sums.masked_fill(none, 0)


def _backward(
    gradient, query, key, value, output, sums, bias, causal, scale
) -> tuple[torch.Tensor, ...]:
    assert sums.shape == query.shape[:3]
    scores, factor = _scores(query, key, bias, causal, scale)
    weights = (scores - sums.unsqueeze(-1)).exp()
    of_weights = gradient @ value.transpose(2, 3) - (gradient * output).sum(-1, keepdim=True)
    of_scores = weights * of_weights
    return (
        of_scores @ key * factor,
        of_scores.transpose(2, 3) @ query * factor,
        weights.transpose(2, 3) @ gradient,
        of_scores,
    )


def _by_length(tensor: torch.Tensor) -> torch.Tensor:
    """In the order in memory (batch, length, heads, size)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _check_bias(query, key, bias) -> None:
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.stride(-1) == 1
        starts = (bias.storage_offset(), *bias.stride()[:-1])
        assert not any(start % 8 for start in starts), "attn_bias is not correctly aligned"


def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None):
    output, sums = _forward(query, key, value, None, is_causal, scale)
    states = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    lengths = query.shape[2], key.shape[2]
    return output, sums, None, None, *lengths, *states, output.new_empty(0)


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, philox_seed, philox_offset, scale=None,
):  # fmt: skip
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    assert cum_seq_q is None
    assert (philox_seed.shape, philox_seed.dtype) == ((2,), torch.uint64)
    assert philox_offset.shape == ()
    operands = (grad_out, query, key, value, out, logsumexp, None)
    return _backward(*operands, is_causal, scale)[:3]


def _efficient(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, scale=None
):
    _check_bias(query, key, attn_bias)
    output, sums = _forward(query, key, value, attn_bias, is_causal, scale)
    scores, _ = _scores(query, key, attn_bias, is_causal, scale)
    output, sums = _without_masked_rows(scores, output, sums)
    sums = pad(sums, (0, -sums.shape[2] % 32), value=math.inf)
    sums = sums if compute_log_sumexp else sums[..., :0]
    states = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    return _by_length(output), sums, *states


def _efficient_backward(
    grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
    grad_input_mask, is_causal=False, scale=None,
):  # fmt: skip
    _check_bias(query, key, attn_bias)
    length = query.shape[2]
    assert logsumexp.shape[2] == length + -length % 32
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    operands = (grad_out, query, key, value, out, logsumexp[:, :, :length], attn_bias)
    *found, of_bias = _backward(*operands, is_causal, scale)
    return *map(_by_length, found), of_bias if grad_input_mask[3] else None


def _cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
    return_debug_mask=False, scale=None,
):  # fmt: skip
    output, sums = _forward(query, key, value, attn_bias, is_causal, scale)
    states = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    lengths = query.shape[2], key.shape[2]
    return output, sums.unsqueeze(-1), None, None, *lengths, *states, None


def _cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
    cum_seq_k, max_q, max_k, dropout_p, is_causal, scale=None,
):  # fmt: skip
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    operands = (grad_out, query, key, value, out, logsumexp.squeeze(-1), attn_bias)
    return _backward(*operands, is_causal, scale)[:3]


_FUNCTIONS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
# The query, behind the gradient of the output.
_QUERIES = {name: 1 for name in _FUNCTIONS if name.endswith("backward")}
# A context in which the CPU has them; gives the calls: the operator, the shape of queries.
on_cpu = partial(cuda_operators.on_cpu, _FUNCTIONS, _QUERIES)
