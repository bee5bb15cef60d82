"""The report on the memory of a train step."""

from collections.abc import Mapping
from typing import Any

import attrs
from rich.table import Table

from shardcore.domain.cost.events import Kind
from shardcore.reporting.tables import Column, Report, build, human_bytes

COLUMNS = (Column("memory of a rank"), Column("bytes", right=True), Column("of", "below"))
KINDS: dict[Kind, str] = {
    "variables": "weights, seeds and metrics, as they are stored",
    "optimizer": "its variables",
    "batch": "this rank's rows",
    "gradients": "those of the variables, after they are reduced",
    "activations": "all other results of operators, and gradients before they are reduced",
    "collectives": "what collectives give: all-gathered weights, reduced sums",
}


@attrs.frozen
class MemoryReport(Report):
    """The memory that a rank takes in an eager train step, as the first steps of `fit` are.

    Args:
        policy: The policy's name.
        mesh: The mesh as text.
        model: The model's name.
        step: The bytes by kind at the highest point of the step.
        checkpoint: The bytes that the rank copies to write its part of a sharded checkpoint.

    Example:
        >>> step = {"variables": 100, "optimizer": 200, "gradients": 100, "activations": 50}
        >>> report = MemoryReport("tensor_parallel", "(data=1, model=2)", "net", step, 300)
        >>> report.kept, report.step_peak, report.checkpoint_peak
        (300, 450, 600)
    """

    policy: str
    mesh: str
    model: str
    step: Mapping[Kind, int]
    checkpoint: int

    @property
    def kept(self) -> int:
        """The bytes that the rank keeps between steps."""
        return self.step.get("variables", 0) + self.step.get("optimizer", 0)

    @property
    def step_peak(self) -> int:
        """The bytes at the highest point of the step."""
        return sum(self.step.values())

    @property
    def checkpoint_peak(self) -> int:
        """The bytes while a sharded checkpoint is written between two steps."""
        return self.kept + self.checkpoint

    def to_dict(self) -> dict[str, Any]:
        """Converts it to plain data, fit for JSON, with the sums."""
        names = ("kept", "step_peak", "checkpoint_peak")
        return {**super().to_dict(), **{name: getattr(self, name) for name in names}}

    def table(self, width: int | None = None) -> Table:
        """Builds a table with a row per kind, and the sums."""
        rows: list[tuple[str, ...]] = [
            (kind, human_bytes(self.step.get(kind, 0)), what) for kind, what in KINDS.items()
        ]
        rows += [
            (),
            ("highest in a step", human_bytes(self.step_peak), "all of the above at one time"),
            (
                "highest in a save",
                human_bytes(self.checkpoint_peak),
                "variables, optimizer, and the copy that is written as a sharded checkpoint",
            ),
        ]
        title = f"a train step of model {self.model!r}: policy {self.policy}, mesh {self.mesh}"
        return build(title, COLUMNS, rows, width)
