"""Attention in a ring: a rank has its queries, and the keys and values of all ranks come by.

For each part of the keys, an operator of torch gives the attention to them, with the logarithm of
its sum of powers, by which the parts are weighted (Liu et al. 2023, "Ring attention with blockwise
transformers"). With the final sums, the gradient of each part is exact by itself. Gradients of keys
and values travel with them, and are at home at the end.
"""

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.moves.passing import Passing
from shardcore.adapters.engine.operators.attention.call import AttentionCall
from shardcore.adapters.engine.operators.reduce.composed import precise
from shardcore.adapters.engine.plans.task import Parts
from shardcore.adapters.torch_private import without_results
from shardcore.domain.planner.ring import Met, met

# A row whose logarithm is below this meets masked keys only, by a mask of large negative numbers.
# Such a number in float32 has steps above 16: the logarithm of the number of keys is lost in it.
_MASKED = -(2.0**28)


@attrs.frozen(eq=False)
class _Attended:
    """The attention to some keys."""

    output: torch.Tensor
    sums: torch.Tensor  # per query the logarithm of the sum of the powers of its scores
    keys: int  # the number of keys
    others: Sequence[Any]  # what else torch returns

    def joined(self, other: "_Attended") -> "_Attended":
        """Returns the attention to the keys of both."""
        top = torch.maximum(self.sums, other.sums)
        base = top.masked_fill(top == -math.inf, 0)
        weights = []
        for attended in (self, other):
            weight = (attended.sums - base).exp()
            weights.append(torch.where(top < _MASKED, weight * attended.keys, weight))
        total = weights[0] + weights[1]
        # The larger weight is 1 at least, if there is a key.
        own, others = ((weight / total.clamp(min=1)).unsqueeze(-1) for weight in weights)
        output = own * self.output + others * other.output
        return _Attended(output, base + total.log(), self.keys + other.keys, self.others)


@attrs.frozen(eq=False)
class RingAttention:
    """Attention, or its gradient, on this rank's part of the sequence.

    Args:
        call: The call of the operator of torch, which runs on a part of the keys.
        passing: The ring in which keys and values are passed on.
        striped: Whether ranks have stripes of the sequence; see `domain.planner.ring.met`.
    """

    call: AttentionCall
    passing: Passing
    striped: bool

    def forward(self, parts: Parts) -> Sequence[Any]:
        """Returns the results for query, key, value, and a mask if there is one."""
        query, key, value, *masks = parts
        attended: _Attended | None = None
        for owner, (keys, values) in self.passing.around(torch.stack([key, value])):
            how = self._met(query, keys, owner)
            if how != "none":
                more = self._attended(how, query, keys, values, self._of_owner(masks, owner))
                attended = more if attended is None else attended.joined(more)
        if attended is None:
            others = without_results(self.call.operator)[2:]
            return torch.zeros_like(query), torch.zeros_like(precise(query[..., 0])), *others
        sums = attended.sums.masked_fill(attended.sums == -math.inf, 0) if masks else attended.sums
        return attended.output.to(query.dtype), sums, *attended.others

    def backward(self, parts: Parts) -> Sequence[Any]:
        """Returns the gradients of query, key and value, and none of a mask."""
        gradient, query, key, value, output, sums, *rest = parts
        masks, states = (rest[:1], rest[1:]) if self.call.mask else ([], rest)
        total = torch.zeros_like(precise(query))
        own = coming = None
        for hop, (owner, held) in enumerate(self.passing.around(torch.stack([key, value]))):
            here = torch.zeros_like(held)
            how = self._met(query, held[0], owner)
            if how != "none":
                of_query, of_key, of_value = self._gradients(
                    how,
                    (gradient, query, *held, output, sums),
                    self._of_owner(masks, owner),
                    states,
                )
                total = total + of_query
                here = torch.stack([of_key, of_value])
            if coming is not None:
                here = here + self.passing.arrived(coming, held, hop - 1)
            if own is None:
                own = here
            else:
                coming = self.passing.start(here, hop)
        assert own is not None
        if coming is not None:
            own = own + self.passing.arrived(coming, own, self.passing.count - 1)
        return total.to(query.dtype), *own, *without_results(self.call.operator)[3:]

    def _met(self, query: torch.Tensor, keys: torch.Tensor, owner: int) -> Met:
        how = met(self.passing.place, owner, causal=self.call.causal, striped=self.striped)
        length = keys.shape[2] - (how == "earlier")
        return how if length > 0 and query.shape[2] else "none"

    def _of_owner(self, masks: Sequence[torch.Tensor], owner: int) -> torch.Tensor | None:
        """Returns the columns of the mask for the keys of `owner`; None without a mask."""
        sizes = self.passing.sizes
        return masks[0].narrow(3, sum(sizes[:owner]), sizes[owner]) if masks else None

    def _attended(
        self,
        how: Met,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> _Attended:
        if how == "earlier":
            query, keys, values = query[:, :, 1:], keys[:, :, :-1], values[:, :, :-1]
        output, sums, *others = self.call.output(query, keys, values, mask, causal=how != "all")
        if mask is not None:
            none = self.call.meets_no_key(mask)
            sums = sums.masked_fill(none, -math.inf)
            output = output.masked_fill(none.unsqueeze(-1), 0)
        if how == "earlier":
            output = torch.nn.functional.pad(output, (0, 0, 1, 0))
            sums = torch.nn.functional.pad(sums, (1, 0), value=-math.inf)
        return _Attended(precise(output), sums, keys.shape[2], others)

    def _gradients(
        self,
        how: Met,
        operands: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        states: Sequence[torch.Tensor],
    ) -> Sequence[Any]:
        gradient, query, keys, values, output, sums = operands
        if how == "earlier":
            gradient, query, output = (tensor[:, :, 1:] for tensor in (gradient, query, output))
            keys, values, sums = keys[:, :, :-1], values[:, :, :-1], sums[:, :, 1:]
        given = (gradient, query, keys, values, output, sums)
        gradients = self.call.gradients(given, mask, states, causal=how != "all")[:3]
        if how != "earlier":
            return gradients
        pads = ((0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 1))
        return [
            torch.nn.functional.pad(grad, pad) for grad, pad in zip(gradients, pads, strict=True)
        ]
