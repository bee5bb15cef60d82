"""Inductor, torch's compiler of graphs."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import fx

from shardcore.adapters.torch_compat import collectives, pooling
from shardcore.adapters.torch_compat.collectives import collective_name, is_wait
from shardcore.domain.capture import NotCaptured


def compiled(module: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """`module` compiled for operands like `examples`; random values are those of eager torch.

    What is compiled is kept in torch's cache on disk, so an equal step of any process is loaded.

    torch 2.13: `torch.compile` would trace the graph again and guard what needs no guards;
    `torch._inductor.compile` takes no settings for one graph alone. With `reorder_for_locality`
    each collective would be started where it is waited for. With `layout_optimization` what a
    convolution depends on would lie with its second dim last, as the channels of torch's images
    do: Keras' images have theirs last already, as a rule, and would lie across.
    """
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import decompositions
    from torch._inductor.scheduler import SchedulerNode

    settings = {
        "fallback_random": True,
        "reorder_for_locality": False,
        "layout_optimization": False,
        "post_grad_custom_post_pass": _one_gather_at_a_time(),
    }
    with (
        torch.no_grad(),
        patch.dict(decompositions, pooling.by_tiles(decompositions)),
        # Two methods by which, in torch 2.13, steps have wrong numbers, in silence.
        _wrapped(PythonWrapperCodegen, "can_reuse", _unless_part),
        _wrapped(SchedulerNode, "recompute_size_and_body", _with_renames),
        _cacheable(examples) as forms,
    ):
        made: Any = compile_fx(module, forms, config_patches=settings)
    return cast(Callable[..., Any], made)


@contextmanager
def _cacheable(examples: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The forms of `examples`, while torch keeps on disk what is compiled for them.

    torch 2.13 does so where shapes may be symbols, of which there are none here, and where the
    table of decompositions is its own. The key is made of the graph when it is decomposed, the
    settings, torch's files, and the `uuid` of passes (see `_one_gather_at_a_time`). Its other
    cache, of autograd's, is left out: the key of that does not tell which operands share memory.
    """
    from torch._functorch import config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    with config.patch(enable_autograd_cache=False):
        yield [mode.from_tensor(each, static_shapes=True) for each in examples]


def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    return patch.object(owner, name, wrap(getattr(owner, name)))


def _unless_part(can_reuse: Callable[..., bool]) -> Callable[..., bool]:
    """What lies in the memory of a `stack` or `cat` is not overwritten in place.

    `SchedulerNode.decide_inplace_update` takes such a part for a tensor with memory of its own. The
    memory is given away when the parts are read no more, but what was written into one of them
    is still read: wrong gradients of a `SimpleRNN` that goes backwards.
    """

    def can_reuse_unless_part(codegen: Any, buffer: Any, overwriting: Any = None) -> bool:
        if overwriting is not None and buffer.node.get_inputs_that_alias_output():
            return False
        return can_reuse(codegen, buffer, overwriting)

    return can_reuse_unless_part


def _with_renames(recompute: Callable[..., None]) -> Callable[..., None]:
    """Loops that are made again to fit those beside them still wait for what is written in place.

    They read a sum after its all-reduce, which is done in place, and so by another name: without
    that name they are run ahead of it, as it takes less memory. It is kept in some cases only.
    """

    def recompute_with_renames(node: Any, *args: Any, **kwargs: Any) -> None:
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return recompute_with_renames


def _one_gather_at_a_time() -> Any:
    """A pass over Inductor's graph: over gloo a gather starts when that before has been waited for.

    Two at once break the memory there (see `capture.analyses.gathering_ranks`). The recording has
    them in turns, and Inductor keeps the order of collectives; but it may move a wait.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class OneGatherAtATime(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

            after: dict[Any, Any] = {node: [wait] for node, wait in _gathers_after_waits(graph)}
            preserve_node_ordering(graph, after)

        def uuid(self) -> Any:
            # It stands in the key of what is kept for all that is done to Inductor here, and for
            # the instructions of this processor, whose widths are written into its code.
            asked = os.environ.get("ATEN_CPU_CAPABILITY", "")
            key = hashlib.sha256(f"{torch.backends.cpu.get_cpu_capability()} {asked}".encode())
            for file in (__file__, collectives.__file__, pooling.__file__):
                key.update(Path(file).read_bytes())
            return key.digest()

    return OneGatherAtATime()


def _gathers_after_waits(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """The gathers on a CPU but the first of each group, and what must have been waited for."""
    last: dict[Any, fx.Node] = {}
    found = []
    for node in graph.nodes:
        if collective_name(node.target) == "all_gather" and node.meta["val"].device.type == "cpu":
            group = node.args[-1]
            if group in last:
                found.append((node, _wait_for(last[group])))
            last[group] = node
    return found


def _wait_for(gather: fx.Node) -> fx.Node:
    for user in gather.users:
        if is_wait(user.target):
            return user
    raise NotCaptured(f"nothing waits for {gather}, and another gather would start beside it")
