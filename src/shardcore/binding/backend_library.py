"""Patches: the backend's `distribution_lib`, which `keras.distribution` calls, as on JAX.

What Keras does with a distribution itself on torch is disabled, most of it since 3.16: it makes
DTensors of data, variables and logs, which shardcore lays out instead.
"""

import random
from types import SimpleNamespace
from typing import Any

import attrs
import keras

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces, replaces_value
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.types import Original
from shardcore.domain.errors import LayoutError, MeshError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports.types import Array
from shardcore.ports.world import Processes, World

# torch's device type -> Keras' name for it, where they differ
_KERAS_DEVICE = {"cuda": "gpu"}
_DEVICE_TYPES = ("cpu", "gpu", "tpu")


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
        """Lists every device of the job, one per process: "cpu:0", "cpu:1", or "gpu:0", ...

        A type that is absent here has none.
        """
        self.initialize()
        return self.joined_devices(device_type)

    def joined_devices(self, device_type: str | None = None) -> list[str]:
        """Lists the devices as `list_devices` does, but without joining the job."""
        own = _KERAS_DEVICE.get(self.processes.device_type, self.processes.device_type)
        wanted = device_type.lower() if device_type else own
        if wanted not in (*_DEVICE_TYPES, own):
            raise MeshError(
                f"There is no device type {device_type!r}: give 'cpu', 'gpu' or 'tpu', or none for "
                f"that of this job, {own!r}.",
                name=device_type,
            )
        if wanted not in (own, "cpu"):
            return []
        return [f"{wanted}:{process}" for process in range(self.processes.world_size)]

    def get_device_count(self, device_type: str | None = None) -> int:
        """Counts the devices of the job."""
        return len(self.list_devices(device_type))

    def num_processes(self) -> int:
        """Counts the processes of the job, after joining it."""
        self.initialize()
        return self.processes.world_size

    def process_id(self) -> int:
        """Looks up the rank of this process, after joining the job."""
        self.initialize()
        return self.processes.rank

    def distribute_tensor(self, tensor: Array, layout: keras.distribution.TensorLayout) -> Any:
        """Redistributes `tensor`, sharded or plain and equal on all ranks, into `layout`."""
        if keras_private.is_symbolic():
            return tensor
        target: Layout = layout.backend_layout.fitting(tensor.shape, "A tensor")
        world: World = layout.device_mesh.backend_mesh
        plain = keras.ops.convert_to_tensor(tensor)
        return self.sessions.strategy(world).redistribute(plain, target)

    def _to_backend_mesh(self, device_mesh: keras.distribution.DeviceMesh) -> World:
        self.initialize()
        devices = [str(device) for device in device_mesh.devices.flatten()]
        if len(devices) != self.processes.world_size:
            raise MeshError(
                f"DeviceMesh {tuple(device_mesh.shape)} has {len(devices)} devices, but the job "
                f"has {self.processes.world_size} processes: use all of keras.distribution."
                "list_devices(), or start one for each device (torchrun --nproc_per_node=N)."
            )
        mesh = Mesh(device_mesh.shape, device_mesh.axis_names)
        ranks = tuple(map(_process, devices))
        return World(mesh, ranks, self.processes.rank, self.processes.device_type)

    def _to_backend_layout(self, tensor_layout: keras.distribution.TensorLayout) -> Layout:
        if tensor_layout.device_mesh is None:
            raise LayoutError(
                f"TensorLayout {tensor_layout.axes} has no device mesh: give TensorLayout(axes, "
                "device_mesh)."
            )
        world: World = tensor_layout.device_mesh.backend_mesh
        return Layout(world.mesh, tensor_layout.axes)


def _process(device: str) -> int:
    """Parses the number in a name from `list_devices`, such as "cpu:1"."""
    _, _, number = device.partition(":")
    if not number.isdigit():
        raise MeshError(
            f"Device {device!r} has no number: name devices as keras.distribution.list_devices() "
            'does, such as "cpu:0" or "gpu:3".'
        )
    return int(number)


@replaces_value(
    "keras.src.trainers.data_adapters:distribution_lib",
    reason="Refuses everything but tf.data in several processes; shardcore takes the rows itself.",
)
@replaces_value(
    "keras.src.trainers.data_adapters.array_data_adapter:distribution_lib",
    "keras.src.trainers.data_adapters.py_dataset_adapter:distribution_lib",
    "keras.src.trainers.data_adapters.torch_data_loader_adapter:distribution_lib",
    reason="Gives each process other batches; shardcore shards every batch.",
    since=(3, 16),
)
def library_of_adapters(_original: object) -> SimpleNamespace:
    """Replaces the module `distribution_lib` in the data adapters: they see no distribution."""
    return SimpleNamespace(distribution=lambda: None)


@replaces(
    "keras.src.backend.torch.trainer:distribution",
    reason="Lays out batches, outputs and metrics as DTensors of Keras.",
    since=(3, 16),
)
@replaces(
    "keras.src.backend.torch.trainer:TorchTrainer._initialize_ddp",
    reason="Wraps the model in DDP if there is a process group.",
    since=(3, 16),
)
@replaces(
    "keras.src.backend.torch.core:Variable._initialize_distributed",
    reason="Lays out the variable as a DTensor of Keras.",
    since=(3, 16),
)
def do_nothing(_original: Original, *_arguments: object) -> None:
    """Replaces what makes DTensors of Keras, and the distribution that the trainer sees: none."""


@replaces_value(
    "keras.src.backend.torch.nn:DTensor",
    reason="Attention computes on the local shards of a DTensor, and makes a plain DTensor of "
    "them.",
    since=(3, 16),
)
def class_without_tensors(_original: type) -> type:
    """Replaces the class `DTensor` in attention by one of which no tensor is an instance."""
    return SimpleNamespace


@replaces(
    "keras.src.trainers.trainer:Trainer._resolve_auto_jit_compile",
    reason='On torch jit_compile="auto" becomes False, which a user may ask for too: '
    "both stay known.",
)
def unresolved_jit_compile(_original: Original, trainer: object) -> Any:
    """Replaces `Trainer._resolve_auto_jit_compile`: a captured step resolves it."""
    return keras_private.AUTO
