"""Patches: the backend's `distribution_lib`, which `keras.distribution` calls, as on JAX."""

import random
from typing import Any

import attrs
import keras

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces_value
from shardcore.binding.ranks.session import Sessions
from shardcore.domain.errors import LayoutError, MeshError
from shardcore.domain.layouts.layout import Layout
from shardcore.ports.types import Array
from shardcore.ports.world import Processes, World

# torch's device type -> Keras' name for it, where they differ
KERAS_DEVICE = {"cuda": "gpu"}
DEVICE_TYPES = ("cpu", "gpu", "tpu")


@attrs.define(slots=False, eq=False)
class BackendLibrary:
    """The functions of `keras.src.backend.jax.distribution_lib` that Keras calls on torch.

    As in a module, a test may replace them: Keras' own tests do.
    """

    processes: Processes
    sessions: Sessions

    @replaces_value(
        "keras.src.backend:distribution_lib",
        reason="None on torch: keras.distribution calls it.",
    )
    @replaces_value(
        "keras.src.distribution.distribution_lib:distribution_lib",
        reason="Keeps its own reference to the backend library.",
    )
    def instead_of_none(self, _original: None) -> "BackendLibrary":
        """Replaces the library that Keras lacks on torch."""
        return self

    def initialize(
        self,
        job_addresses: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
    ) -> None:
        """Joins the job. All ranks then draw from one seed, unless the user has set one."""
        if not self.processes.initialize(job_addresses, num_processes, process_id):
            return
        # Not the generator that the user may have seeded: each rank draws, rank 0's draw is used.
        drawn = random.SystemRandom().randint(1, 10**9)
        seeds = self.processes.gather((keras_private.get_random_seed(), drawn))
        if all(user is None for user, _ in seeds):
            keras.utils.set_random_seed(seeds[0][1])

    def list_devices(self, device_type: str | None = None) -> list[str]:
        """Returns every device of the job, one per process: "cpu:0", "cpu:1", or "gpu:0", ...

        A type that is absent here has none.
        """
        self.initialize()
        return self.joined_devices(device_type)

    def joined_devices(self, device_type: str | None = None) -> list[str]:
        """Returns, named as in `list_devices`, the devices of processes that have joined so far."""
        own = KERAS_DEVICE.get(self.processes.device_type, self.processes.device_type)
        wanted = device_type.lower() if device_type else own
        if wanted not in (*DEVICE_TYPES, own):
            raise MeshError(
                f"There is no device type {device_type!r}: give 'cpu', 'gpu' or 'tpu', or none for "
                f"that of this job, {own!r}.",
                name=device_type,
            )
        if wanted not in (own, "cpu"):
            return []
        return [f"{wanted}:{process}" for process in range(self.processes.world_size)]

    def get_device_count(self, device_type: str | None = None) -> int:
        """Returns the number of devices of the job."""
        return len(self.list_devices(device_type))

    def num_processes(self) -> int:
        """Returns the number of processes of the job."""
        self.initialize()
        return self.processes.world_size

    def process_id(self) -> int:
        """Returns the rank of this process."""
        self.initialize()
        return self.processes.rank

    def distribute_tensor(self, tensor: Array, layout: keras.distribution.TensorLayout) -> Any:
        """Returns `tensor` in `layout`, a Keras `TensorLayout`."""
        if keras_private.is_symbolic():
            return tensor
        target: Layout = layout.backend_layout.fitting(tensor.shape, "A tensor")
        world: World = layout.device_mesh.backend_mesh
        plain = keras.ops.convert_to_tensor(tensor)
        return self.sessions.strategy(world).redistribute(plain, target)

    def _to_backend_mesh(self, device_mesh: keras.distribution.DeviceMesh) -> World:
        self.initialize()
        return self.sessions.world(device_mesh)

    def _to_backend_layout(self, tensor_layout: keras.distribution.TensorLayout) -> Layout:
        if tensor_layout.device_mesh is None:
            raise LayoutError(
                f"TensorLayout {tensor_layout.axes} has no device mesh: give TensorLayout(axes, "
                "device_mesh)."
            )
        world: World = tensor_layout.device_mesh.backend_mesh
        return Layout(world.mesh, tensor_layout.axes)
