"""The report on a plan: its rules, and the bytes of the variables that they decide."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from rich.table import Table

from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.domain.layouts.spec import DimSpec
from shardcore.domain.layouts.variable_size import VariableSize
from shardcore.reporting.tables import Column, Report, build, human_bytes

COLUMNS = (
    Column("rule"), Column("spec"), Column("shape", "drop"), Column("variables", right=True),
    Column("outputs", "drop", right=True), Column("bytes a rank", right=True),
    Column("bytes in all", "drop", right=True), Column("reason", "below"),
)  # fmt: skip


@attrs.frozen
class PlannedRule:
    """One rule, with the variables and outputs that it decides.

    Args:
        rule: The rule's key; empty for the variables that no rule matches.
        spec: Its value as text.
        shapes: The global shapes of the variables, each once.
        variables: The number of variables.
        outputs: The number of layer outputs that it lays out.
        bytes_here: The bytes of the variables on the fullest rank.
        bytes_full: The bytes of the full variables.
        reason: Why the policy chose it.
    """

    rule: str
    spec: str
    shapes: tuple[tuple[int, ...], ...]
    variables: int
    outputs: int
    bytes_here: int
    bytes_full: int
    reason: str

    def row(self) -> tuple[str, ...]:
        """Returns its cells in the table."""
        return (
            self.rule or "(no rule)", self.spec, " ".join(map(str, self.shapes)),
            str(self.variables), str(self.outputs), human_bytes(self.bytes_here),
            human_bytes(self.bytes_full), self.reason,
        )  # fmt: skip


@attrs.frozen
class PlanReport(Report):
    """The rules of a plan as they are now.

    Args:
        policy: The policy's name; empty for a layout map of the program.
        mesh: The mesh as text.
        rules: One entry per rule.

    Example:
        >>> sizes = {"variables": 1, "outputs": 0, "bytes_here": 64, "bytes_full": 128}
        >>> rule = PlannedRule("up/kernel", (None, "model"), ((8, 4),), **sizes, reason="pair")
        >>> report = PlanReport("tensor_parallel", "(data=1, model=2)", (rule,))
        >>> report.bytes_here, report.bytes_full
        (64, 128)
    """

    policy: str
    mesh: str
    rules: tuple[PlannedRule, ...]

    @property
    def bytes_here(self) -> int:
        """The bytes of the variables on the fullest rank."""
        return sum(rule.bytes_here for rule in self.rules)

    @property
    def bytes_full(self) -> int:
        """The bytes of all variables."""
        return sum(rule.bytes_full for rule in self.rules)

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain data, fit for JSON."""
        sums = {"bytes_here": self.bytes_here, "bytes_full": self.bytes_full}
        return {**super().to_dict(), **sums}

    def table(self, width: int | None = None) -> Table:
        """Returns a table with a row per rule, and the sums."""
        rows = [rule.row() for rule in self.rules]
        variables, outputs = (
            str(sum(getattr(rule, name) for rule in self.rules))
            for name in ("variables", "outputs")
        )
        sums = (variables, outputs, human_bytes(self.bytes_here), human_bytes(self.bytes_full))
        rows += [(), (f"{len(self.rules)} rules", "", "", *sums, "")]
        made_by = f"policy {self.policy}" if self.policy else "layouts of the program"
        return build(f"{made_by}, mesh {self.mesh}", COLUMNS, rows, width)


def plan_report(
    policy: str,
    mesh: Mesh,
    variables: Iterable[VariableSize],
    outputs: Iterable[str],
    rules: PathRules[tuple[DimSpec, ...]],
    reasons: Mapping[str, str],
) -> PlanReport:
    """Returns the report on rules, specs by keys, for the variables and the outputs of these paths.

    Raises:
        LayoutError: If a rule does not fit a variable that it decides.
    """
    decided: dict[str, list[VariableSize]] = {key: [] for key in rules}
    for variable in variables:
        match = rules.match(variable.path)
        decided.setdefault("" if match is None else match.key, []).append(variable)
    laid_out = Counter(match.key for path in outputs if (match := rules.match(path)))

    def bytes_here(variable: VariableSize, key: str) -> int:
        try:
            return variable.bytes_here(rules[key], mesh) if key else variable.bytes
        except LayoutError as error:
            raise LayoutError(
                f"Rule {key!r} for variable {variable.path!r}: {error}", name=key
            ) from error

    return PlanReport(
        policy,
        str(mesh),
        tuple(
            PlannedRule(
                key,
                str(rules[key]) if key else "replicated",
                tuple(dict.fromkeys(variable.shape for variable in matched)),
                len(matched),
                laid_out[key],
                sum(bytes_here(variable, key) for variable in matched),
                sum(variable.bytes for variable in matched),
                reasons.get(key, "") if key else "no rule matches: replicated",
            )
            for key, matched in decided.items()
        ),
    )
