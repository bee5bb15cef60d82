"""The report on a machine: the speeds of a device, and the links."""

from typing import Any

import attrs
from rich.table import Table

from shardcore.domain.cost.machine import Machine
from shardcore.reporting.tables import Column, Report, build, human_bytes

COLUMNS = (Column("what"), Column("value", right=True), Column("and", right=True))


@attrs.frozen
class MachineReport(Report):
    """A machine as a table."""

    machine: Machine

    def to_dict(self) -> dict[str, Any]:
        """Converts the machine to plain data, which `machine=FILE` reads."""
        return self.machine.to_dict()

    def table(self, width: int | None = None) -> Table:
        """Builds a table with a row for each dtype, each link and its kinds of collectives."""
        machine = self.machine
        rows: list[tuple[str, ...]] = [
            (dtype, f"{speed.flops / 1e9:.3g} GFLOP/s", f"{speed.bandwidth / 1e9:.3g} GB/s")
            for dtype, speed in machine.speeds.items()
        ]
        links = {"link within a host": machine.within, "link between hosts": machine.between}
        for name, link in links.items():
            rows.append((name, f"{link.latency * 1e6:.3g} µs", f"{link.bandwidth / 1e9:.3g} GB/s"))
            rows += [
                (f"  {kind}", "", f"{bandwidth / 1e9:.3g} GB/s")
                for kind, bandwidth in link.bandwidths.items()
            ]
        rows.append(("hidden share of a collective", f"{machine.hidden:.2f}", ""))
        rows.append(("memory of a device", human_bytes(machine.memory), ""))
        return build(f"{machine.name}: {machine.devices} devices a host", COLUMNS, rows, width)
