"""The reports on a machine, and on policy `auto`, which predicts the time of a step on it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
from rich.table import Table

from shardcore.domain.cost.machine import Machine
from shardcore.domain.cost.rank_step import StepCost
from shardcore.domain.layouts.mesh import Mesh
from shardcore.reporting.tables import Column, Report, build, human_bytes

# The number of candidates that the table has.
SHOWN = 10

# Reasons against a candidate that fits the model.
BATCH = "the batch does not divide by the ranks that share it"
MEMORY = "memory"
IDLE = "nothing is sharded over one of the axes: its ranks compute the same"
EQUAL = "every variable has the layout that it has in another row"

COLUMNS = (
    Column("policy and mesh"), Column("step", right=True), Column("compute", right=True),
    Column("exposed", right=True), Column("memory", right=True), Column("sends", "below"),
    Column("holds", "below"), Column("loses because", "below"), Column("policies", "below"),
)  # fmt: skip
MACHINE_COLUMNS = (Column("what"), Column("value", right=True), Column("and", right=True))


@attrs.frozen
class Priced:
    """A candidate that fits.

    Args:
        policy: The name of the policy.
        mesh: The mesh.
        cost: The predicted cost of a step.
        options: The options of the policy.
    """

    policy: str
    mesh: Mesh
    cost: StepCost
    options: Mapping[str, Any]

    @property
    def by_layer(self) -> str:
        """The policies of layers, in words; empty if all have one."""
        names: dict[str, list[str]] = {}
        for layer, name in self.options.get("layers", {}).items():
            names.setdefault(name, []).append(layer)
        texts = [f"{name} in {', '.join(layers)}" for name, layers in names.items()]
        return "; ".join([*texts, f"{self.options['otherwise']} elsewhere"]) if texts else ""


@attrs.frozen
class PassedOver:
    """A candidate that does not fit.

    Args:
        policy: The name of the policy.
        mesh: The mesh.
        reason: The reason.
        bytes: The bytes that it needs at least, if that is the reason.
    """

    policy: str
    mesh: Mesh
    reason: str
    bytes: int = 0


@attrs.frozen
class Ranking(Report):
    """Meshes and policies for a model, by the predicted time of a step.

    Args:
        rows: The rows of the global batch.
        machine: The machine.
        priced: Those that fit, the fastest first.
        passed_over: Those that do not.
    """

    rows: int
    machine: Machine
    priced: tuple[Priced, ...]
    passed_over: tuple[PassedOver, ...]

    def to_dict(self) -> dict[str, Any]:
        """Converts it to plain data, fit for JSON, with seconds, bytes and reasons."""
        plain = super().to_dict()
        for candidate, data in zip(self.priced, plain["priced"], strict=True):
            data["cost"] |= {"seconds": candidate.cost.seconds, "peak": candidate.cost.peak}
            data["why"] = self.why(candidate)
        return plain

    def prediction(self) -> str:
        """Writes the memory and the time of a step of the first."""
        cost = self.priced[0].cost
        return (
            f"{human_bytes(cost.peak)} at the highest point of a step, which is predicted to take "
            f"{human_seconds(cost.seconds)} on {self.machine.name}"
        )

    def why(self, other: Priced) -> str:
        """Explains why a candidate is slower than the first; empty for the first."""
        best, cost = self.priced[0].cost, other.cost
        computes, waits = cost.compute - best.compute, cost.exposed - best.exposed
        if max(computes, waits) <= 0:
            return ""
        if computes > waits:
            return f"computes {human_seconds(computes)} longer"
        slowest = max(cost.communication, key=lambda axis: cost.communication[axis])
        return f"waits {human_seconds(waits)} longer, most for axis {slowest!r}"

    def why_none(self) -> str:
        """Joins the reasons against all candidates, in words."""
        return "; ".join(
            f"{what}: {why}{least and f' ({least})'}"
            for what, why, least in self._reasons_against()
        )

    def table(self, width: int | None = None) -> Table:
        """Builds a table of the best candidates, and why the others are out."""
        shown = self.priced[:SHOWN]
        columns = COLUMNS if any(candidate.by_layer for candidate in shown) else COLUMNS[:-1]
        rows: list[tuple[str, ...]] = [self._row(candidate) for candidate in shown]
        more = len(self.priced) - SHOWN
        rows += [()] if self.passed_over or more > 0 else []
        if more > 0:
            rows.append((f"{more} more that fit", "", "", "", "", "", "", "they are slower", ""))
        rows += [
            (f"{what} out", "", "", "", least, "", "", reason, "")
            for what, reason, least in self._reasons_against()
        ]
        title = (
            f"predicted steps of {self.rows} rows on {self.machine.name}: "
            f"{self.machine.devices} devices a host, {human_bytes(self.machine.memory)} each"
        )
        return build(title, columns, rows, width)

    def _row(self, candidate: Priced) -> tuple[str, ...]:
        cost = candidate.cost
        seconds = map(human_seconds, (cost.seconds, cost.compute, cost.exposed))
        size = "x".join(map(str, candidate.mesh.shape))
        sends = "nothing"
        if cost.sent:
            sends = ", ".join(f"{axis} {human_bytes(sent)}" for axis, sent in cost.sent.items())
        holds = ", ".join(f"{kind} {human_bytes(held)}" for kind, held in cost.memory.items())
        name = f"{candidate.policy} {size}"
        why = self.why(candidate)
        lines = (f"sends: {sends}", f"holds: {holds}", why and f"loses: {why}", candidate.by_layer)
        return name, *seconds, human_bytes(cost.peak), *lines

    def _reasons_against(self) -> list[tuple[str, str, str]]:
        """Counts the reasons against the others, each with the least bytes."""
        rows = []
        for reason, count in Counter(candidate.reason for candidate in self.passed_over).items():
            these = [candidate for candidate in self.passed_over if candidate.reason == reason]
            least = min(these, key=lambda candidate: candidate.bytes)
            if reason == MEMORY:
                text = f"too large for the memory; the smallest is {least.policy} {least.mesh}"
                rows.append((f"{count} layouts", text, human_bytes(least.bytes)))
            else:
                rows.append((f"{count} layouts", reason, ""))
        return rows


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
        title = f"{machine.name}: {machine.devices} devices a host"
        return build(title, MACHINE_COLUMNS, rows, width)


def human_seconds(seconds: float) -> str:
    """Formats a time for people, in the unit that fits.

    Example:
        >>> human_seconds(2.5), human_seconds(0.0123), human_seconds(4e-5)
        ('2.50 s', '12.3 ms', '40.0 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{2 if unit == 's' else 1}f} {unit}"
    return f"{seconds * 1e6:.1f} µs"
