"""Inductor, torch's compiler of graphs."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx


def compiled(module: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """`module` compiled for operands like `examples`; random values are those of eager torch.

    torch 2.13: `torch.compile` would trace the graph anew and guard what needs no guards;
    `torch._inductor.compile` takes no settings for one graph alone.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), config.patch(fallback_random=True):
        made: Any = compile_fx(module, list(examples))
    return cast(Callable[..., Any], made)
