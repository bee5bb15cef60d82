"""Signatures: what two steps must have in common to share a program.

They are those of a batch, with the modes of torch, and of the closures of a loop (ADR 32).
"""

from collections.abc import Iterator
from contextlib import ExitStack
from types import CodeType, FunctionType, MethodType
from typing import Any

import attrs
import keras
import numpy as np
import torch

from shardcore.binding import keras_private
from shardcore.binding.ranks.session import Session

# Values without parts: they are compared, not entered.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# The devices on which Keras computes.
_DEVICES = ("cpu", "cuda", "mps", "xpu")


@attrs.frozen
class Signature:
    """The key of the cache: batches with equal signatures share programs.

    Args:
        kind: The nesting and dtypes of the batch, and the modes in which the steps run.
        sizes: The shapes, strides and layouts of their tensors.
    """

    kind: str
    sizes: tuple[Any, ...]

    @classmethod
    def of(cls, data: object, session: Session | None, mode: object) -> "Signature":
        """Describes a batch; a tensor that is in it twice differs from two equal ones.

        Args:
            data: The batch, a nest of tensors.
            session: The session of the step; None on one device.
            mode: In what the step differs from others with the same batch.
        """
        seen: list[Any] = []
        sizes: list[Any] = []

        def kind_of(leaf: object) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            layout = None if session is None else session.strategy.layout(leaf)
            sizes.append((tuple(leaf.shape), leaf.stride(), str(layout)))
            same = next((n for n, earlier in enumerate(seen) if earlier is leaf), None)
            seen.append(leaf)
            bits = leaf.is_conj(), leaf.is_neg(), leaf.is_inference()
            return f"{leaf.ndim} {leaf.dtype} {leaf.device} {leaf.requires_grad} {same} {bits}"

        nest = keras_private.map_leaves(kind_of, data)
        mesh = None if session is None else (session.mesh, sorted(session.declared))
        modes = torch_modes(), keras_private.settings(), mode
        return cls(f"{nest} {modes} {mesh}", tuple(sizes))


@attrs.frozen
class Closures:
    """The values in the closures of functions, nested functions included.

    Args:
        codes: The code of the functions.
        tensors: The tensors, each once.
        objects: Layers, samplers and whatever else is no number, name, array or container.
        key: Equal for functions that differ in the values of their tensors only.
    """

    codes: frozenset[CodeType]
    tensors: tuple[torch.Tensor, ...]
    objects: tuple[Any, ...]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, *functions: Any) -> "Closures":
        """Walks the closures, defaults and bound objects of `functions`.

        Example:
            >>> def linear(scale, shift):
            ...     return lambda x: x * scale + shift
            >>> found = Closures.of(linear(torch.tensor(2.0), shift=3))
            >>> found.tensors, found.objects, (int, 3) in found.key
            ((tensor(2.),), (), True)
        """
        walk = _ClosureWalk()
        key = tuple(walk.key(functions))
        return cls(frozenset(walk.codes), tuple(walk.tensors), tuple(walk.objects), key)

    @property
    def model(self) -> keras.Model | None:
        """The first model among the objects; None without one."""
        return next((model for model in self.objects if isinstance(model, keras.Model)), None)


@attrs.define(eq=False)
class _ClosureWalk:
    codes: set[CodeType] = attrs.field(factory=set, init=False)
    tensors: list[torch.Tensor] = attrs.field(factory=list, init=False)
    objects: list[Any] = attrs.field(factory=list, init=False)
    # By identity, and kept: no other object gets that identity.
    visited: dict[int, Any] = attrs.field(factory=dict, init=False)

    def key(self, value: Any) -> Iterator[Any]:
        if isinstance(value, PLAIN):
            yield type(value), value
        elif id(value) in self.visited:
            yield list(self.visited).index(id(value))
        else:
            self.visited[id(value)] = value
            yield from self._parts(value)

    def _parts(self, value: object) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, np.ndarray):
            yield value.shape, value.dtype, value.tobytes()
        elif isinstance(value, FunctionType):
            self.codes.add(value.__code__)
            yield value.__code__
            yield from self.key(list(map(_content, value.__closure__ or ())))
            yield from self.key((value.__defaults__, value.__kwdefaults__))
        elif isinstance(value, MethodType):
            yield from self.key((value.__func__, value.__self__))
        elif isinstance(value, dict):
            yield from self.key([inner for pair in value.items() for inner in pair])
        elif isinstance(value, list | tuple):
            yield type(value), len(value)
            for inner in value:
                yield from self.key(inner)
        else:
            self.objects.append(value)
            yield id(value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def torch_modes() -> tuple[Any, ...]:
    """The modes that this thread is in now.

    Example:
        >>> before = torch_modes()
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     torch_modes() == before
        False
        >>> torch_modes() == before
        True
    """
    cuda: Any = torch.backends.cuda  # torch gives its functions no types
    deterministic: Any = torch.utils.deterministic
    return (
        *_autocasting(),
        *map(torch.get_autocast_dtype, _DEVICES),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        *(torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        *(torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        *(cuda.cudnn_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()),
        deterministic.fill_uninitialized_memory,
    )


def below_autocast() -> ExitStack:
    """Makes or runs a program below autocast: its casts are part of the trace."""
    stack = ExitStack()
    for device in _autocasting():
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def keeps_casts() -> bool:
    """Whether autocast keeps weights that it has cast, until its scope ends."""
    return bool(_autocasting()) and torch.is_autocast_cache_enabled()


def _autocasting() -> list[str]:
    return [device for device in _DEVICES if torch.is_autocast_enabled(device)]
