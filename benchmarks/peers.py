"""Training written by hand in PyTorch, in the layouts that PyTorch offers."""

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.parallel import DistributedDataParallel

from benchmarks import by_hand, cases, clocks
from benchmarks.cases import ADAM_EPSILON, LEARNING_RATE, Case
from benchmarks.training import Fitting

COLUMNS = ("query", "key", "value", "expand", "up")
ROWS = ("attention_output", "contract", "down")
ROWS_ARE_SHARDED = ("data parallel", "fully sharded")


def train(case: Case, layout: str, device: str) -> "PeerTraining":
    """A model that is ready for its first step. `layout` is "whole" on one process."""
    module = _laid_out(by_hand.build(case).to(device), layout)
    return PeerTraining(case, module, _optimizers(module), layout, device)


def _optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Fused: the fastest Adam that PyTorch has, four times the speed of its default on a CPU.

    It does not take sharded and plain parameters together.
    """
    sharded = [each for each in module.parameters() if isinstance(each, DTensor)]
    plain = [each for each in module.parameters() if not isinstance(each, DTensor)]
    return [
        torch.optim.Adam(parameters, LEARNING_RATE, eps=ADAM_EPSILON, fused=True)
        for parameters in (sharded, plain)
        if parameters
    ]


def _laid_out(module: nn.Module, layout: str) -> nn.Module:
    if layout == "data parallel":
        return DistributedDataParallel(module)
    if layout == "whole":
        return module
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        if layout == "megatron":
            parallelize_module(block, mesh, _plan(block))
        else:
            fully_shard(block, mesh=mesh)
    return module if layout == "megatron" else fully_shard(module, mesh=mesh)


def _plan(block: nn.Module) -> dict[str, Any]:
    """Columns first, rows next: one sum over the ranks for each pair, forward and backward."""
    names = [name for name, each in block.named_modules() if isinstance(each, nn.Linear)]
    by_columns = {name: ColwiseParallel() for name in names if name.endswith(COLUMNS)}
    return by_columns | {name: RowwiseParallel() for name in names if name.endswith(ROWS)}


@frozen(eq=False)
class PeerTraining(Fitting):
    """A loop over batches."""

    case: Case
    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    layout: str
    device: str

    def losses(self, steps: int) -> list[float]:
        (batch,) = self._batches(1)
        return [self._read(self._step(*batch)) for _ in range(steps)]

    def epoch(self, steps: int) -> float:
        batches = self._batches(steps)
        began = time.perf_counter()
        self._read(sum(self._step(*batch) for batch in batches) / steps)
        return (time.perf_counter() - began) / steps

    def waiting(self, steps: int, source: str) -> float:
        x, y = map(torch.from_numpy, self.case.data(steps))
        if source == "arrays":
            rows = [tensor if self.device == "cpu" else tensor.pin_memory() for tensor in (x, y)]
            batches = zip(*(tensor.split(self.case.batch) for tensor in rows), strict=True)
        else:
            batches = clocks.loader(x, y, self.case.batch, self.device)
        clock = clocks.Clock(self.device)
        for inputs, labels in clocks.copied_ahead(batches, self.device):
            with clock.step():
                self._step(inputs, labels.long())
        return clock.share()

    def kept(self) -> Iterator[torch.Tensor]:
        yield from self.module.parameters()
        yield from self.module.buffers()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from state.values()

    def share(self) -> int:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        shapes = by_hand.keras_shapes(self.module)
        return cases.share(shapes, self.layout, ranks)

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.module(x.to(self.device))
        loss = F.cross_entropy(logits.flatten(0, -2), y.to(self.device).flatten())
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def _read(self, loss: torch.Tensor) -> float:
        """The loss of the global batch."""
        if self.layout in ROWS_ARE_SHARDED:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return float(loss)

    def _batches(self, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's rows of each step's batch."""
        x, y = map(torch.from_numpy, self.case.data(steps))
        batches = zip(x.chunk(steps), y.long().chunk(steps), strict=True)
        return [(self._rows(x), self._rows(y)) for x, y in batches]

    def _rows(self, batch: torch.Tensor) -> torch.Tensor:
        return (
            batch.chunk(dist.get_world_size())[dist.get_rank()]
            if self.layout in ROWS_ARE_SHARDED
            else batch
        )
