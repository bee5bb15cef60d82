"""The same models as a PyTorch programmer would write them, with the values of the Keras models."""

import itertools
import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from benchmarks.cases import Case, first_value

EPSILON = 1e-3  # of Keras' normalizations


class Mlp(nn.Module):
    """Pairs of layers."""

    def __init__(self, width: int, hidden: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair(width, hidden) for _ in range(blocks))
        self.logits = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


class Pair(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.down(F.relu(self.up(x))))


class Cnn(nn.Module):
    """Convolutions over images whose channels come last, as Keras has them."""

    def __init__(self, size: int, filters: int, blocks: int, classes: int) -> None:
        super().__init__()
        depths = [3, *(filters * 2**number for number in range(blocks))]
        self.blocks = nn.ModuleList(Stage(*pair) for pair in itertools.pairwise(depths))
        self.logits = nn.Linear(depths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 3, 1, 2)
        for block in self.blocks:
            x = block(x)
        return self.logits(x.mean((2, 3)))


class Stage(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(ins, outs, 3, padding=1, bias=False)
        self.norm = BatchNorm(outs, eps=EPSILON, momentum=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


class BatchNorm(nn.BatchNorm2d):
    """Statistics of the global batch. `torch.nn.SyncBatchNorm` has no CPU kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not dist.is_initialized():
            return super().forward(x)
        rows = x.numel() // x.shape[1] * dist.get_world_size()
        sums = torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        mean, square = (SumOverRanks.apply(sums) / rows).chunk(2)
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return torch.addcmul(shift[:, None, None], x, scale[:, None, None])


class SumOverRanks(torch.autograd.Function):
    """Every rank's gradient has a part of every rank's value."""

    @staticmethod
    def forward(ctx, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return SumOverRanks.apply(gradient)


class Decoder(nn.Module):
    """Predicts from each prefix of a window the token that follows it."""

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int, length: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.last_norm = nn.LayerNorm(width, eps=EPSILON)
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.last_norm(x))


class Embeddings(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position.weight


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, eps=EPSILON)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))


class Attention(nn.Module):
    """Causal. Under tensor parallelism the projections give this rank's heads only."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.attention_output = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            projection(x).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.attention_output(mixed.transpose(1, 2).flatten(2))


KINDS: dict[str, Callable[..., nn.Module]] = {"mlp": Mlp, "cnn": Cnn, "decoder": Decoder}


def build(case: Case) -> nn.Module:
    """The module of a case, with the first values of the Keras model."""
    module = KINDS[case.kind](**case.sizes)
    with torch.no_grad():
        for name, each in module.named_modules():
            _fill(each, _keras_path(name))
    return module


def keras_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The global shapes of its parameters, each under a name that the rules of Keras match."""
    named = ((_keras_path(name), each) for name, each in module.named_parameters())
    return {
        re.sub("weight$", "kernel", name.removeprefix("module/")): tuple(each.shape)
        for name, each in named
    }


def _keras_path(name: str) -> str:
    return re.sub(r"blocks\.(\d+)", r"block_\1", name).replace(".", "/")


def _fill(module: nn.Module, path: str) -> None:
    if isinstance(module, nn.Linear):
        ins_outs = (module.in_features, module.out_features)
        module.weight.copy_(_first(f"{path}/kernel", ins_outs).T)
        module.bias.zero_()
    elif isinstance(module, nn.Conv2d):
        outs, ins, *window = module.weight.shape
        module.weight.copy_(_first(f"{path}/kernel", (*window, ins, outs)).permute(3, 2, 0, 1))
    elif isinstance(module, nn.Embedding):
        module.weight.copy_(_first(f"{path}/embeddings", tuple(module.weight.shape)))


def _first(path: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(first_value(path, shape))
