"""Shape, bytes and layout of a variable, for plans, explanations and traces."""

from math import prod

import attrs

from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.spec import DimSpec


@attrs.frozen
class VariableSize:
    """A variable with its shape and its bytes.

    Example:
        >>> kernel = VariableSize("block_0/dense/kernel", (4, 8), itemsize=2)
        >>> kernel.name, kernel.bytes
        ('kernel', 64)
    """

    path: str  # its path, such as "block_0/dense/kernel"
    shape: tuple[int, ...]  # its global shape
    itemsize: int = 4  # the bytes of one element

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def bytes(self) -> int:
        """The bytes of the full tensor."""
        return prod(self.shape) * self.itemsize

    def bytes_here(self, spec: tuple[DimSpec, ...], mesh: Mesh) -> int:
        """Counts the bytes on the fullest rank, which is the first, as `torch.chunk` cuts.

        Raises:
            LayoutError: If `spec` does not fit the variable or the mesh.
        """
        return prod(Layout(mesh, spec).local_shape(self.shape, rank=0)) * self.itemsize


@attrs.frozen
class ShardedVariable(VariableSize):
    """A variable with its layout; or its gradient, or a state of the optimizer for it.

    Example:
        >>> kernel = ShardedVariable("kernel", (6, 2), ("data", None))
        >>> kernel.bytes_on(Mesh((2,), ("data",))), kernel.bytes_on(Mesh((4,), ("data",)))
        (24, 16)
    """

    spec: tuple[DimSpec, ...]  # per tensor dim the mesh axes that shard it
    itemsize: int = 4  # the bytes of one element

    def bytes_on(self, mesh: Mesh) -> int:
        """Counts the bytes on the fullest rank of `mesh`."""
        return self.bytes_here(self.spec, mesh)
