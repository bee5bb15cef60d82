"""A base class for subclasses of DTensor, with the private names that they need.

torch 2.13: a DTensor has its layout in a `DTensorSpec`, whose class is private, as is that of the
shape, strides and dtype in it. A DTensor has the spec and its local shard in private attributes
(`_spec`, `_local_tensor`).
"""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["DTensorSpec", "GivenDTensor", "TensorMeta"]


class GivenDTensor(DTensor):
    """A DTensor without shard and spec: a subclass provides them."""

    part: torch.Tensor
    spec: DTensorSpec  # its layout, shape, strides and dtype

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
