"""The result of `shardcore.verify()`."""

import attrs
from rich.table import Table
from rich.text import Text

from shardcore.reporting.tables import Column, Report, build, human_bytes

COLUMNS = (
    Column("variable"), Column("rule", "below"), Column("spec"), Column("shape", "drop"),
    Column("local shape", "drop"), Column("bytes here", right=True),
    Column("bytes in all", "drop", right=True), Column("stored"), Column("gradient"),
)  # fmt: skip


@attrs.frozen
class VariableCheck:
    """The check of one variable, as found on this rank and confirmed on all.

    Args:
        path: The variable's path.
        rule: The layout map's rule that decided, None if no rule did.
        spec: The layout as text.
        shape: The global shape.
        local_shape: The shape of this rank's shard.
        bytes_here: The bytes of this rank's storage.
        bytes_full: The bytes of the full tensor.
        stored: Whether every rank stores its shard of the full tensor, and nothing else.
        gradient: The layout of its gradient as text, None without a gradient.
        gradient_fits: Whether that is the variable's layout on every rank; None without one.
        stale: A message if the rules have changed since the variable was built, else None.
    """

    path: str
    rule: str | None
    spec: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    bytes_here: int
    bytes_full: int
    stored: bool
    gradient: str | None
    gradient_fits: bool | None
    stale: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the variable is as its rule says."""
        return self.stored and self.gradient_fits is not False and self.stale is None


@attrs.frozen
class Verification(Report):
    """The report on a model.

    Args:
        mesh: The mesh as text.
        strategy: The strategy's name.
        rank: The rank that made this report.
        variables: One check per variable: the model's, then the optimizer's.
        unused_rules: The rules of the layout map that matched no variable and no output.

    Example:
        >>> spec = "(None, 'model')"
        >>> sizes = {"shape": (8, 4), "local_shape": (8, 2), "bytes_here": 64, "bytes_full": 128}
        >>> state = {"stored": True, "gradient": None, "gradient_fits": None}
        >>> check = VariableCheck("up/kernel", "up/kernel", spec, **sizes, **state)
        >>> report = Verification("(data=1, model=2)", "dtensor", 0, (check,))
        >>> report.ok, report.bytes_here, report.bytes_full
        (True, 64, 128)
    """

    derived = ("ok",)
    mesh: str
    strategy: str
    rank: int
    variables: tuple[VariableCheck, ...]
    unused_rules: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every variable is as its rule says."""
        return all(check.ok for check in self.variables)

    @property
    def bytes_here(self) -> int:
        """The bytes that this rank stores."""
        return sum(check.bytes_here for check in self.variables)

    @property
    def bytes_full(self) -> int:
        """The bytes of all variables."""
        return sum(check.bytes_full for check in self.variables)

    def table(self, width: int | None = None) -> Table:
        """Builds a table with a row per variable, and the sums."""
        seen = any(check.gradient_fits is not None for check in self.variables)
        fine = "all as it should be" if seen else "as it should be, gradients not checked"
        verdict = fine if self.ok else "WRONG, see below"
        title = f"strategy {self.strategy}, mesh {self.mesh}, rank {self.rank}: {verdict}"
        sums = (human_bytes(self.bytes_here), human_bytes(self.bytes_full))
        last = (f"{len(self.variables)} variables", "", "", "", "", *sums, "", "")
        table = build(title, COLUMNS, [*map(_row, self.variables), (), last], width)
        notes = [f"WRONG: {check.path}: {check.stale}" for check in self.variables if check.stale]
        if not seen:
            notes.append("No variable has a gradient, as captured steps leave none: give a batch.")
        if self.unused_rules:
            notes.append(f"Rules that matched nothing: {', '.join(self.unused_rules)}")
        table.caption = Text("\n".join(notes)) if notes else None
        return table


def _row(check: VariableCheck) -> tuple[str, ...]:
    gradient = {None: "-", True: "ok", False: f"WRONG: {check.gradient}"}[check.gradient_fits]
    return (
        check.path,
        check.rule or "-",
        check.spec,
        str(check.shape),
        str(check.local_shape),
        human_bytes(check.bytes_here),
        human_bytes(check.bytes_full),
        "ok" if check.stored else "WRONG",
        gradient,
    )
