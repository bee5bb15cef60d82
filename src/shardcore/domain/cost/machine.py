"""A machine as data: what its devices compute in a second, and the links between them.

It describes hosts that are alike. The rates are those of one device. Those of well-known machines
are the highest that their makers' data sheets give, without sparsity: programs reach a part of
them. `docs/reference/machines.md` has the sources. Latencies are those of `collective_cost`: no
sheet has them.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import attrs

from shardcore.domain.cost.collective_cost import BETWEEN_HOSTS, WITHIN_A_HOST, Link, slowest
from shardcore.domain.errors import MachineError, MeshError
from shardcore.domain.layouts.mesh import Mesh


@attrs.frozen
class Speed:
    """The speed of a device with numbers of one dtype.

    Args:
        flops: The floating-point operations of matrix products in a second.
        bandwidth: The bytes that it reads and writes in its memory in a second.

    Raises:
        MachineError: If one of them is not a positive number.

    Example:
        >>> Speed(flops=100e12, bandwidth=2e12).seconds(flops=100e9, moved=1e9)
        0.001
    """

    flops: float
    bandwidth: float

    def __attrs_post_init__(self) -> None:
        for name, unit in (("flops", "operations a second"), ("bandwidth", "bytes a second")):
            _check_positive("A speed", name, getattr(self, name), unit)

    def seconds(self, flops: float, moved: float) -> float:
        """The seconds of an operator that does `flops` and moves `moved` bytes of memory.

        This is the roofline: the slower of the two alone. Williams, Waterman and Patterson,
        "Roofline", Communications of the ACM 52 (4), 2009.
        """
        return max(flops / self.flops, moved / self.bandwidth)


@attrs.frozen
class Machine:
    """Hosts that are alike, with devices that are alike.

    Args:
        name: Its name.
        devices: The devices of one host.
        memory: The bytes of memory of one device.
        speeds: The speed of one device by dtype, "float32" among them, which stands in for a dtype
            without one.
        within: The link of a device to those of its host.
        between: The link of a device to those of other hosts: its share of the network.
        hidden: The share of its time, from 0 to 1, in which a collective runs beside operators
            without slowing them down. On CPUs both need the cores.

    Raises:
        MachineError: If a field has a value that it may not have.

    Example:
        >>> machine = Machine("mine", 2, 10**9, {"float32": Speed(1e12, 1e10)})
        >>> machine.speed("bfloat16").flops
        1000000000000.0
    """

    name: str
    devices: int
    memory: int
    speeds: Mapping[str, Speed]
    within: Link = WITHIN_A_HOST
    between: Link = BETWEEN_HOSTS
    hidden: float = 1.0

    def __attrs_post_init__(self) -> None:
        for name, unit in (("devices", "a number of devices"), ("memory", "bytes")):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise MachineError(
                    f"A machine has {name}, an integer, {unit}: got {value!r}.", got=repr(value)
                )
            _check_positive("A machine", name, value, unit)
        is_number = isinstance(self.hidden, int | float) and not isinstance(self.hidden, bool)
        if not is_number or not 0 <= self.hidden <= 1:
            raise MachineError(
                f"A machine has hidden from 0 to 1, a share: got {self.hidden!r}.",
                got=repr(self.hidden),
            )
        if "float32" not in self.speeds:
            raise MachineError(
                "A machine has a speed for 'float32', which stands in for a dtype without one: "
                f"got speeds for {list(self.speeds)}."
            )

    def speed(self, dtype: str) -> Speed:
        """The speed with numbers of `dtype`; that of float32 if it is unknown."""
        return self.speeds.get(dtype, self.speeds["float32"])

    def links(self, mesh: Mesh) -> dict[str, Link]:
        """Finds the link of each axis of a mesh whose ranks fill one host after the other.

        An axis whose groups are each in one host has the link within it. Along another axis the
        ranks of a host send over their shares of the network together, as the rings of NCCL do:
        the bandwidth of a rank is that of all of them, at most that within the host.

        Example:
            >>> machine = Machine("mine", 4, 10**9, {"float32": Speed(1e12, 1e10)})
            >>> links = machine.links(Mesh((2, 4), ("data", "model")))
            >>> links["data"] == machine.between, links["model"] == machine.within
            (True, True)
            >>> machine.links(Mesh((8,), ("data",)))["data"].bandwidth
            13000000000.0
        """
        return {axis: self._link(mesh, axis) for axis in mesh.axis_names}

    def _link(self, mesh: Mesh, axis: str) -> Link:
        size, at = mesh.axis_size(axis), mesh.axis_index(axis)
        step = math.prod(mesh.shape[at + 1 :])  # between neighbours along the axis
        if mesh.size <= self.devices or self.devices % (step * size) == 0:
            return self.within
        together = max(1, min(size, self.devices // step))
        return slowest((self.within, self.between.times(together)))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, fit for JSON."""
        return attrs.asdict(self)


def machine_of(data: object) -> Machine:
    """Reads a machine from plain data, as `Machine.to_dict` writes it.

    Raises:
        MachineError: If a field is missing, unknown, or has a value that it may not have.

    Example:
        >>> machine = Machine("mine", 2, 10**9, {"float32": Speed(1e12, 1e10)})
        >>> machine_of(machine.to_dict()) == machine
        True
    """
    fields = _fields(Machine, data, "A machine")
    speeds = fields["speeds"]
    if not isinstance(speeds, Mapping):
        raise MachineError(
            f"Expected the speeds of a machine as a table by dtype, such as {{'float32': "
            f"{{...}}}}, got {speeds!r}. 'shardcore measure FILE' writes an example.",
            got=repr(speeds),
        )
    made: dict[str, Speed] = {
        str(dtype): Speed(**_fields(Speed, speed, f"The speed for {dtype!r}"))
        for dtype, speed in speeds.items()
    }
    links: dict[str, Any] = {
        name: _link(fields[name], f"The link {name!r}")
        for name in ("within", "between")
        if name in fields
    }
    return Machine(**(fields | links | {"speeds": made}))


def _link(data: object, what: str) -> Link:
    try:
        return Link(**_fields(Link, data, what))
    except MeshError as error:
        raise MachineError(f"{what}: {error}") from error


def _fields(kind: type[Any], data: object, what: str) -> dict[str, Any]:
    """Checks the names of the fields that `data` has for `kind`."""
    if not isinstance(data, Mapping):
        raise MachineError(
            f"{what} is given by its fields, got {data!r}: write a table with the fields "
            f"{', '.join(field.name for field in attrs.fields(kind))}.",
            got=repr(data),
        )
    known = {field.name: field.default is attrs.NOTHING for field in attrs.fields(kind)}
    missing = [name for name, needed in known.items() if needed and name not in data]
    unknown = [name for name in data if name not in known]
    if missing or unknown:
        wrong = [f"{name!r} is missing" for name in missing]
        wrong += [f"{name!r} is unknown" for name in unknown]
        raise MachineError(f"{what} has the fields {', '.join(known)}: {', '.join(wrong)}.")
    return dict(data)


def _check_positive(what: str, name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise MachineError(f"{what} has {name} above 0, in {unit}, got {value!r}.", got=repr(value))


_GB = 10**9
# PCI Express with 16 lanes, in one direction.
_PCIE_3, _PCIE_4 = 16e9, 32e9
_HALF = ("bfloat16", "float16")
_ONLY_FLOAT16 = ("float16",)  # bfloat16 is emulated: float32 stands in for it


def _gpus(
    name: str,
    devices: int,
    memory: int,
    half: float,
    single: float,
    bandwidth: float,
    link: float,
    nic: float,
    half_dtypes: tuple[str, ...] = _HALF,
) -> Machine:
    """Builds a host of GPUs; `link` and `nic` are bytes a second of a GPU in one direction."""
    speeds = {"float32": Speed(single, bandwidth)}
    speeds |= {dtype: Speed(half, bandwidth) for dtype in half_dtypes}
    within = Link(WITHIN_A_HOST.latency, link)
    return Machine(name, devices, memory, speeds, within, Link(BETWEEN_HOSTS.latency, nic))


def known_machines() -> dict[str, Machine]:
    """Builds the machines of `docs/reference/machines.md`, by name.

    Example:
        >>> list(known_machines())
        ['t4', 'v100', 'a10g', 'l4', 'rtx4090', 'p4d', 'a100', 'h100', 'h200']
    """
    machines = (
        _gpus("t4", 4, 16 * _GB, 65e12, 8.1e12, 0.32e12, _PCIE_3, 1.5625e9, _ONLY_FLOAT16),
        _gpus("v100", 8, 32 * _GB, 125e12, 15.7e12, 0.9e12, 150e9, 1.5625e9, _ONLY_FLOAT16),
        _gpus("a10g", 8, 24 * _GB, 70e12, 35e12, 0.6e12, _PCIE_4, 1.5625e9),
        _gpus("l4", 8, 24 * _GB, 121e12, 30.3e12, 0.3e12, _PCIE_4, 1.5625e9),
        _gpus("rtx4090", 2, 24 * _GB, 165.2e12, 82.6e12, 1.008e12, _PCIE_4, 0.625e9),
        _gpus("p4d", 8, 40 * _GB, 312e12, 19.5e12, 1.555e12, 300e9, 6.25e9),
        _gpus("a100", 8, 80 * _GB, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
        _gpus("h100", 8, 80 * _GB, 989e12, 67e12, 3.35e12, 450e9, 50e9),
        _gpus("h200", 8, 141 * _GB, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    )
    return {machine.name: machine for machine in machines}


# The whole names that CUDA gives the devices. A part of a device (MIG), and a variant with other
# rates such as "NVIDIA H100 PCIe", is no device of these machines.
_CUDA_NAMES = {
    "t4": r"(Tesla|NVIDIA) T4",
    "v100": r"(Tesla|NVIDIA) V100-SXM[23]-(16|32)GB(-LS)?",
    "a10g": r"NVIDIA A10G",
    "l4": r"NVIDIA L4",
    "rtx4090": r"NVIDIA GeForce RTX 4090",
    "p4d": r"(NVIDIA )?A100-SXM4-40GB",
    "a100": r"(NVIDIA )?A100-SXM4-80GB",
    "h100": r"NVIDIA H100( 80GB HBM3)?",
    "h200": r"NVIDIA H200",
}


def machine_with(cuda_name: str) -> Machine | None:
    """Finds the machine whose devices have this name in CUDA; None if no known one has.

    Example:
        >>> machine_with("Tesla T4").speed("float16").flops
        65000000000000.0
        >>> machine_with("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
        True
    """
    matches = (name for name, names in _CUDA_NAMES.items() if re.fullmatch(names, cuda_name))
    name = next(matches, None)
    return None if name is None else known_machines()[name]
