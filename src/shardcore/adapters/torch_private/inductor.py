"""Inductor, torch's compiler of graphs, with two of its errors corrected (ADR 19)."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import fx

from shardcore.adapters.torch_private import collectives
from shardcore.adapters.torch_private.collectives import collective_name, is_wait, runs_on_gloo
from shardcore.adapters.torch_private.dispatch_modes import count_devices
from shardcore.domain.capture import NotCaptured


def compile_graph(module: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compiles `module` for operands like `examples`, with the random values of eager torch.

    The graph of `module` is dropped: the code has its tensors, and nothing reads the graph again.

    The code is in torch's cache on disk, from which any process loads an equal step (ADR 22).

    torch 2.13: `torch.compile` would trace the graph again and guard what needs no guards;
    `torch._inductor.compile` takes no settings for one graph alone. `reorder_for_locality` would
    start each collective just before its wait. `layout_optimization` would store the operands of a
    convolution with the second dim innermost, as for torch's images. Keras' images usually have
    their channels innermost already, and would get another order.
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
        patch.dict(decompositions, decompose_by_tiles(decompositions)),
        # Two methods that, in torch 2.13, give wrong numbers without an error.
        _patch_method(PythonWrapperCodegen, "can_reuse", _refuse_parts),
        _patch_method(SchedulerNode, "recompute_size_and_body", _keep_renames),
        _fake_tensors(examples) as forms,
    ):
        made: Any = compile_fx(module, forms, config_patches=settings)
    module.graph = fx.Graph()  # unused from now on; its nodes would keep pages of the compiler
    return cast(Callable[..., Any], made)


@contextmanager
def _fake_tensors(examples: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields fake tensors for `examples`, in a context in which torch caches the code on disk.

    torch 2.13 does so if shapes may be symbols, of which there are none here, and if the table of
    decompositions is the default. The key consists of the decomposed graph, the settings, torch's
    files, and the `uuid` of passes (see `_one_gather_at_a_time`). The cache of autograd is left
    out: its key ignores which operands share memory.
    """
    from torch._functorch import config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    count_devices()
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes)
    with config.patch(enable_autograd_cache=False):
        yield [mode.from_tensor(example, static_shapes=True) for example in examples]


def _patch_method(
    owner: object, name: str, wrap: Callable[[Any], object]
) -> AbstractContextManager[Any]:
    return patch.object(owner, name, wrap(getattr(owner, name)))


def _refuse_parts(can_reuse: Callable[..., bool]) -> Callable[..., bool]:
    """Prevents in-place writes into a tensor in the memory of a `stack` or `cat`.

    `SchedulerNode.decide_inplace_update` treats such a part as a tensor with separate memory. The
    memory is reused after the last read of the parts, but the `stack` is still read: wrong
    gradients of a `SimpleRNN` that goes backwards.
    """

    def can_reuse_unless_part(codegen: object, buffer: Any, overwriting: object = None) -> bool:
        if overwriting is not None and buffer.node.get_inputs_that_alias_output():
            return False
        return can_reuse(codegen, buffer, overwriting)

    return can_reuse_unless_part


def _keep_renames(recompute: Callable[..., None]) -> Callable[..., None]:
    """Keeps the dependencies on in-place writes of loops that are recomputed for fusion.

    They read a sum after its in-place all-reduce, by another name. torch keeps that name in some
    cases only; without it they run before the all-reduce, to save memory.
    """

    def recompute_with_renames(node: Any, *args: object, **kwargs: object) -> None:
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    return recompute_with_renames


def _one_gather_at_a_time() -> Any:
    """Makes a pass over Inductor's graph: a gloo all-gather starts after the wait before.

    Two at once corrupt memory there (see `capture.analyses.gathering_ranks`). The trace
    has them in turns, and Inductor keeps the order of collectives; but it may move a wait.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class OneGatherAtATime(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

            after: dict[Any, Any] = {node: [wait] for node, wait in _gathers_after_waits(graph)}
            preserve_node_ordering(graph, after)

        def uuid(self) -> Any:
            # In the key of the cache this stands for all changes to Inductor here, and for the
            # instructions of this processor, whose widths the code contains.
            forced = os.environ.get("ATEN_CPU_CAPABILITY", "")
            key = hashlib.sha256(f"{torch.backends.cpu.get_cpu_capability()} {forced}".encode())
            for file in (__file__, collectives.__file__):
                key.update(Path(file).read_bytes())
            return key.digest()

    return OneGatherAtATime()


def _gathers_after_waits(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs each all-gather of gloo, but the first of a group, with the wait before it."""
    last: dict[Any, fx.Node] = {}
    gathers = []
    for node in graph.nodes:
        if collective_name(node.target) != "all_gather":
            continue
        group = node.args[-1]
        if runs_on_gloo(group, node.meta["val"].device):
            if group in last:
                gathers.append((node, _wait_for(last[group])))
            last[group] = node
    return gathers


def _wait_for(gather: fx.Node) -> fx.Node:
    for user in gather.users:
        if is_wait(user.target):
            return user
    raise NotCaptured(f"nothing waits for {gather}, and another gather would start beside it")


Decompositions = Mapping[Any, Callable[..., Any]]


def decompose_by_tiles(otherwise: Decompositions) -> Decompositions:
    """Builds decompositions for images with innermost channels that are pooled by tiles.

    Inductor (torch 2.13) adds the gradient of max pooling by index, element by element: on a CPU
    half of the step of a small CNN. For tiles, which neither overlap nor are padded, pooling and
    its gradient are comparisons of full tensors.

    Args:
        otherwise: The decompositions of Inductor, for other images. Without one for pooling or
            its gradient, as in torch 2.11, there are none by tiles.
    """
    if not {_POOL, _BACKWARD} <= otherwise.keys():
        return {}
    pool, backward = otherwise[_POOL], otherwise[_BACKWARD]

    def pool_by_tiles(image: torch.Tensor, *how: Any, **named: Any) -> Any:
        tile = _tile(image, *how, **named)
        return pool(image, *how, **named) if tile is None else _pool(image, tile)

    def gradient(of_result: torch.Tensor, image: torch.Tensor, *rest: Any) -> Any:
        *how, indices = rest  # the index of each maximum is recomputed
        tile = _tile(image, *how)
        if tile is None:
            return backward(of_result, image, *how, indices)
        return _gradient(of_result, image, tile)

    return {_POOL: pool_by_tiles, _BACKWARD: gradient}


_POOL = torch.ops.aten.max_pool2d_with_indices.default
_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default

# Each element of a tile is a separate operand in the generated code.
_LARGEST = 16


def _pool(image: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the maximum of each tile, and its index in the image.

    Shapes: (batch, channels, height, width) to (batch, channels, rows, columns), twice.
    """
    largest, index = _largest(image, tile)
    rows, columns = (torch.arange(size, device=image.device) for size in largest.shape[2:])
    row = rows[:, None] * tile[0] + index // tile[1]
    column = columns * tile[1] + index % tile[1]
    return largest, row * image.shape[3] + column


def _gradient(gradient: torch.Tensor, image: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Puts the gradient of each tile where its maximum is, and zeros elsewhere."""
    _, index = _largest(image, tile)
    number = torch.arange(tile[0] * tile[1], dtype=index.dtype, device=index.device)
    is_largest = _spread(index) == number.view(tile[0], 1, tile[1])
    tiles = torch.where(is_largest, _spread(gradient), 0.0)
    full = tiles.flatten(4, 5).flatten(2, 3)
    left = [0, image.shape[3] - full.shape[3], 0, image.shape[2] - full.shape[2]]
    return torch.nn.functional.pad(full, left)


def _tile(
    image: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[int, int] | None:
    """Finds height and width of the tiles; None if there are none, or other code is as fast.

    The operands have the names and defaults of torch.
    """
    tile = (kernel_size[0], kernel_size[-1])
    is_tiled = not stride or (stride[0], stride[-1]) == tile
    is_plain = not any(padding) and set(dilation) == {1} and not ceil_mode
    lies_last = image.dim() == 4 and image.shape[1] > 1 and image.stride(1) == 1
    return tile if is_tiled and is_plain and lies_last and tile[0] * tile[1] <= _LARGEST else None


def _largest(image: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the maximum of each tile, and its index there: the first of equals, the last nan."""
    height, width = tile
    rows, columns = image.shape[2] // height * height, image.shape[3] // width * width
    parts = [
        image[:, :, row:rows:height, column:columns:width]
        for row in range(height)
        for column in range(width)
    ]
    none = torch.zeros_like(parts[0], dtype=torch.int32)
    return functools.reduce(_maximum_with_index, enumerate(parts[1:], 1), (parts[0], none))


def _maximum_with_index(
    best: tuple[torch.Tensor, torch.Tensor], numbered: tuple[int, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    (largest, index), (number, part) = best, numbered
    is_larger = (part > largest) | (part != part)  # as `isnan`, which is not vectorized
    return torch.where(is_larger, part, largest), torch.where(is_larger, number, index)


def _spread(tiled: torch.Tensor) -> torch.Tensor:
    """Adds dims, for the elements of a tile: (batch, channels, rows, 1, columns, 1)."""
    return tiled[:, :, :, None, :, None]
