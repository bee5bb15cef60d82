"""The report on a plan: its rules, and the bytes of the variables that they decide."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from rich.table import Table

from shardcore.domain.errors import LayoutError
from shardcore.domain.mesh import Mesh
from shardcore.domain.paths.rules import PathRules
from shardcore.domain.spec import DimSpec
from shardcore.domain.variable_size import VariableSize
from shardcore.reporting.tables import Shown, human_bytes


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
        bytes_whole: The bytes of the full variables.
        reason: Why the policy chose it.
    """

    rule: str
    spec: str
    shapes: tuple[tuple[int, ...], ...]
    variables: int
    outputs: int
    bytes_here: int
    bytes_whole: int
    reason: str


@attrs.frozen
class PlanReport(Shown):
    """The rules of a plan as they are now.

    Args:
        policy: The policy's name.
        mesh: The mesh as text.
        rules: One entry per rule.
    """

    policy: str
    mesh: str
    rules: tuple[PlannedRule, ...]

    @property
    def bytes_here(self) -> int:
        """The bytes of the variables on the fullest rank."""
        return sum(each.bytes_here for each in self.rules)

    @property
    def bytes_whole(self) -> int:
        """The bytes of all variables."""
        return sum(each.bytes_whole for each in self.rules)

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain data, fit for JSON."""
        sums = {"bytes_here": self.bytes_here, "bytes_whole": self.bytes_whole}
        return {**super().to_dict(), **sums}

    def table(self) -> Table:
        """Returns a table with a row per rule, and the total."""
        table = Table(title=f"policy {self.policy}, mesh {self.mesh}")
        for name in ("rule", "spec", "shape"):
            table.add_column(name, overflow="fold")
        for name in ("variables", "outputs", "bytes a rank", "bytes in all"):
            table.add_column(name, justify="right")
        table.add_column("reason", overflow="fold")
        for each in self.rules:
            table.add_row(
                each.rule or "(no rule)", each.spec, " ".join(map(str, each.shapes)),
                str(each.variables), str(each.outputs), human_bytes(each.bytes_here),
                human_bytes(each.bytes_whole), each.reason,
            )  # fmt: skip
        table.add_section()
        table.add_row(
            f"{len(self.rules)} rules", "", "", str(sum(each.variables for each in self.rules)),
            str(sum(each.outputs for each in self.rules)), human_bytes(self.bytes_here),
            human_bytes(self.bytes_whole), "",
        )  # fmt: skip
        return table


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
            raise LayoutError(f"Rule {key!r} for variable {variable.path!r}: {error}") from error

    return PlanReport(
        policy,
        str(mesh),
        tuple(
            PlannedRule(
                key,
                str(rules[key]) if key else "whole",
                tuple(dict.fromkeys(each.shape for each in found)),
                len(found),
                laid_out[key],
                sum(bytes_here(each, key) for each in found),
                sum(each.bytes for each in found),
                reasons.get(key, "") if key else "no rule matches: replicated",
            )
            for key, found in decided.items()
        ),
    )
