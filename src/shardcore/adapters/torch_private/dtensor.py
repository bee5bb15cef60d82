"""A base class for subclasses of DTensor, with the private names that they need.

torch 2.11 runs the operators on a subclass by DTensor's own rules, and does not call its
`__torch_dispatch__` ([#177716](https://github.com/pytorch/pytorch/issues/177716)). It calls a
function that was registered for an operator and the class.

torch 2.13: a DTensor has its layout in a `DTensorSpec`, whose class is private, as is that of the
shape, strides and dtype in it. A DTensor has the spec and its local shard in private attributes
(`_spec`, `_local_tensor`).
"""

from collections import defaultdict
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["DTensorSpec", "GivenDTensor", "TensorMeta"]


class GivenDTensor(DTensor):
    """A DTensor without shard and spec: a subclass provides them, and runs the operators."""

    part: torch.Tensor
    spec: DTensorSpec  # its layout, shape, strides and dtype

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if torch.__version__ < "2.12":
            _register_operators(cls)

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.part

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        """Does nothing: `swap_tensors` sets the slots of a DTensor after all else was swapped."""

    @property
    def _spec(self) -> DTensorSpec:
        return self.spec

    @_spec.setter
    def _spec(self, value: DTensorSpec) -> None:
        """Does nothing, as for the local shard."""


def _register_operators(kind: type[DTensor]) -> None:
    """Makes torch 2.11 call `__torch_dispatch__` of `kind` for each operator that exists now."""
    for library, names in _operators():
        for name in names:
            torch.library.register_torch_dispatch(name, kind, _dispatch, lib=library)


def _dispatch(
    kind: type[DTensor], func: object, types: object, args: object, kwargs: object
) -> Any:
    return kind.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


@cache
def _operators() -> tuple[tuple[torch.library.Library, tuple[str, ...]], ...]:
    """Groups the names of all operators by namespace, each with a library to register in."""
    names = defaultdict(list)
    for name in torch._C._dispatch_get_all_op_names():
        names[name.partition("::")[0]].append(name)
    libraries = {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in names}  # type: ignore[no-untyped-call]
    return tuple((libraries[namespace], tuple(names[namespace])) for namespace in names)
