"""Ring attention: a rank keeps its queries; keys and values travel around a ring (ADR 43).

For each part of the keys, an operator of torch gives the attention to them, with the logarithm of
its sum of powers, by which the parts are weighted (Liu et al. 2023, "Ring attention with blockwise
transformers"). With the final sums, the gradient of each part is exact by itself. Gradients of keys
and values travel with them, and are back on their rank at the end.
"""

import math
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import attrs
import torch

from shardcore.adapters.engine.engine import Engine
from shardcore.adapters.engine.operators.attention_call import AttentionCall
from shardcore.adapters.engine.operators.composed import precise
from shardcore.adapters.engine.task import Parts
from shardcore.adapters.engine.tensor import Form
from shardcore.adapters.ranks.job.threads import check_thread
from shardcore.adapters.ranks.waiting import wait
from shardcore.adapters.torch_private import collectives, without_results
from shardcore.domain.engine.ring import KeyBlock, visible_keys
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.measurement import Move, redistribution_scope


@attrs.frozen(eq=False)
class RingExchange:
    """A ring: each rank along an axis sends to the next one only, the last to the first.

    Args:
        engine: The engine.
        axis: The axis.
        form: The form of the tensors whose parts are sent.
        layout: The layout of these tensors, in which `axis` shards `dim`.
        dim: The dim, counted from the end: parts may have more dims in front.
    """

    engine: Engine
    axis: str
    form: Form
    layout: Layout
    dim: int

    @property
    def count(self) -> int:
        """The number of ranks along the axis."""
        return self.engine.world.mesh.axis_size(self.axis)

    @property
    def coordinate(self) -> int:
        """The coordinate of this rank along the axis."""
        return self._coordinate_of(self.engine.world.position)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of `dim` in the part of each coordinate."""
        dim = self.dim % self.form.ndim
        return self.layout.chunk_sizes(dim, self.form.shape[dim])

    def owner(self, hop: int) -> int:
        """Finds the coordinate of the rank whose part is here after `hop` hops."""
        return (self.coordinate - hop) % self.count

    def rotate(self, part: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the parts of all ranks, each with the coordinate of its owner; the own one first.

        The next part is on its way while the caller computes.
        """
        for hop in range(self.count):
            incoming = self.send(part, hop) if hop + 1 < self.count else None
            yield self.owner(hop), part
            if incoming is not None:
                part = self.receive(incoming, part, hop)

    def send(self, part: torch.Tensor, hop: int) -> torch.Tensor:
        """Starts hop number `hop`, from 0, and returns the unfinished result; see `receive`.

        It sends `part`, which is that of `owner(hop)`; the result is the part of `owner(hop + 1)`.
        """
        check_thread()
        coordinates = [self._coordinate_of(peer) for peer in self.engine.world.peers(self.axis)]
        after, before = (self.coordinate + 1) % self.count, (self.coordinate - 1) % self.count
        size = prod(self._shape_of_next(part, hop))
        move = Move(part, self.form.shape, self.layout, self.layout, to_next=True)
        with redistribution_scope(move):
            return collectives.all_to_all(
                part.reshape(-1),
                [size if peer == before else 0 for peer in coordinates],
                [part.numel() if peer == after else 0 for peer in coordinates],
                self.engine.groups[self.axis],
            )

    def receive(self, incoming: torch.Tensor, part: torch.Tensor, hop: int) -> torch.Tensor:
        """Waits for the part that comes in hop number `hop`, and returns it.

        `part` is any part: the sizes of its other dims are those of the result.
        """
        return wait(incoming, "all_to_all").reshape(self._shape_of_next(part, hop))

    def _shape_of_next(self, part: torch.Tensor, hop: int) -> list[int]:
        shape = list(part.shape)
        shape[self.dim] = self.sizes[self.owner(hop + 1)]
        return shape

    def _coordinate_of(self, rank: int) -> int:
        return self.engine.world.mesh.position_along([self.axis], rank)


# A row whose logarithm is below this attends to masked keys only: the mask has large negative
# numbers. Near them float32 has steps above 16: the logarithm of the number of keys is lost.
_MASKED = -(2.0**28)


@attrs.frozen(eq=False)
class _PartialAttention:
    """The attention to some keys."""

    output: torch.Tensor
    sums: torch.Tensor  # per query the logarithm of the sum of the powers of its scores
    keys: int  # the number of keys
    others: Sequence[Any]  # torch's other results

    def merge(self, other: "_PartialAttention") -> "_PartialAttention":
        """Weights both outputs by their sums of powers."""
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
        return _PartialAttention(output, base + total.log(), self.keys + other.keys, self.others)


@attrs.frozen(eq=False)
class RingAttention:
    """Attention, or its gradient, on this rank's part of the sequence.

    Args:
        call: The call of the operator of torch, which runs on a part of the keys.
        exchange: The ring in which keys and values are sent.
        striped: Whether ranks have stripes of the sequence: `domain.engine.ring` has both.
    """

    call: AttentionCall
    exchange: RingExchange
    striped: bool

    def forward(self, parts: Parts) -> Sequence[Any]:
        """Computes the results for query, key, value, and a mask if there is one."""
        query, key, value, *masks = parts
        attended: _PartialAttention | None = None
        for owner, (keys, values) in self.exchange.rotate(torch.stack([key, value])):
            visible = self._visible_keys(query, keys, owner)
            if visible != "none":
                more = self._attend(visible, query, keys, values, self._of_owner(masks, owner))
                attended = more if attended is None else attended.merge(more)
        if attended is None:
            others = without_results(self.call.operator)[2:]
            return torch.zeros_like(query), torch.zeros_like(precise(query[..., 0])), *others
        sums = attended.sums.masked_fill(attended.sums == -math.inf, 0) if masks else attended.sums
        return attended.output.to(query.dtype), sums, *attended.others

    def backward(self, parts: Parts) -> Sequence[Any]:
        """Computes the gradients of query, key and value, and none of a mask."""
        gradient, query, key, value, output, sums, *rest = parts
        masks, states = (rest[:1], rest[1:]) if self.call.mask else ([], rest)
        total = torch.zeros_like(precise(query))
        own = incoming = None
        for hop, (owner, held) in enumerate(self.exchange.rotate(torch.stack([key, value]))):
            here = torch.zeros_like(held)
            visible = self._visible_keys(query, held[0], owner)
            if visible != "none":
                of_query, of_key, of_value = self._gradients(
                    visible,
                    (gradient, query, *held, output, sums),
                    self._of_owner(masks, owner),
                    states,
                )
                total = total + of_query
                here = torch.stack([of_key, of_value])
            if incoming is not None:
                here = here + self.exchange.receive(incoming, held, hop - 1)
            if own is None:
                own = here
            else:
                incoming = self.exchange.send(here, hop)
        assert own is not None
        if incoming is not None:
            own = own + self.exchange.receive(incoming, own, self.exchange.count - 1)
        return total.to(query.dtype), *own, *without_results(self.call.operator)[3:]

    def _visible_keys(self, query: torch.Tensor, keys: torch.Tensor, owner: int) -> KeyBlock:
        visible = visible_keys(
            self.exchange.coordinate, owner, causal=self.call.causal, striped=self.striped
        )
        length = keys.shape[2] - (visible == "earlier")
        return visible if length > 0 and query.shape[2] else "none"

    def _of_owner(self, masks: Sequence[torch.Tensor], owner: int) -> torch.Tensor | None:
        """Selects the columns of the mask for the keys of `owner`; None without a mask."""
        sizes = self.exchange.sizes
        return masks[0].narrow(3, sum(sizes[:owner]), sizes[owner]) if masks else None

    def _attend(
        self,
        visible: KeyBlock,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> _PartialAttention:
        if visible == "earlier":
            query, keys, values = query[:, :, 1:], keys[:, :, :-1], values[:, :, :-1]
        output, sums, *others = self.call.output(query, keys, values, mask, causal=visible != "all")
        if mask is not None:
            none = self.call.attends_to_no_key(mask)
            sums = sums.masked_fill(none, -math.inf)
            output = output.masked_fill(none.unsqueeze(-1), 0)
        if visible == "earlier":
            output = torch.nn.functional.pad(output, (0, 0, 1, 0))
            sums = torch.nn.functional.pad(sums, (1, 0), value=-math.inf)
        return _PartialAttention(precise(output), sums, keys.shape[2], others)

    def _gradients(
        self,
        visible: KeyBlock,
        operands: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        states: Sequence[torch.Tensor],
    ) -> Sequence[Any]:
        gradient, query, keys, values, output, sums = operands
        if visible == "earlier":
            gradient, query, output = (tensor[:, :, 1:] for tensor in (gradient, query, output))
            keys, values, sums = keys[:, :, :-1], values[:, :, :-1], sums[:, :, 1:]
        given = (gradient, query, keys, values, output, sums)
        gradients = self.call.gradients(given, mask, states, causal=visible != "all")[:3]
        if visible != "earlier":
            return gradients
        pads = ((0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 1))
        return [
            torch.nn.functional.pad(grad, pad) for grad, pad in zip(gradients, pads, strict=True)
        ]
