"""The reports on a plan: its rules, the bytes that they decide, and the memory of a step."""

from collections import Counter
from collections.abc import Iterable, Mapping

import attrs
from rich.table import Table

from shardcore.domain.cost.events import Kind
from shardcore.domain.errors import LayoutError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.domain.layouts.spec import DimSpec
from shardcore.domain.layouts.variable_size import VariableSize
from shardcore.reporting.logs import log_of
from shardcore.reporting.tables import Column, Report, build, human_bytes

COLUMNS = (
    Column("rule"), Column("spec"), Column("shape", "drop"), Column("variables", right=True),
    Column("outputs", "drop", right=True), Column("bytes a rank", right=True),
    Column("bytes in all", "drop", right=True), Column("reason", "below"),
)  # fmt: skip
MEMORY_COLUMNS = (Column("memory of a rank"), Column("bytes", right=True), Column("of", "below"))
KINDS: dict[Kind, str] = {
    "variables": "weights, seeds and metrics, as they are stored",
    "optimizer": "its variables",
    "batch": "this rank's rows",
    "gradients": "those of the variables, after they are reduced",
    "activations": "all other results of operators, and gradients before they are reduced",
    "collectives": "what collectives give: all-gathered weights, reduced sums",
}


logger = log_of("plan")


def warn_of_idle(policy: str, mesh: Mesh, axes: Iterable[str]) -> None:
    """Warns of the axes of a mesh over which a plan shards nothing."""
    for axis in axes:
        logger.warning(
            "Policy %s shards nothing over mesh axis %r: its %d ranks hold and compute the same. "
            "print(plan) says why; another policy, or a mesh without this axis, would use them.",
            policy,
            axis,
            mesh.axis_size(axis),
        )


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

    derived = ("bytes_here", "bytes_full")
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

    def table(self, width: int | None = None) -> Table:
        """Builds a table with a row per rule, and the sums."""
        rows: list[tuple[str, ...]] = [_row(rule) for rule in self.rules]
        variables, outputs = (
            str(sum(getattr(rule, name) for rule in self.rules))
            for name in ("variables", "outputs")
        )
        sums = (variables, outputs, human_bytes(self.bytes_here), human_bytes(self.bytes_full))
        rows += [(), (f"{len(self.rules)} rules", "", "", *sums, "")]
        made_by = f"policy {self.policy}" if self.policy else "layouts of the program"
        return build(f"{made_by}, mesh {self.mesh}", COLUMNS, rows, width)


def _row(rule: PlannedRule) -> tuple[str, ...]:
    return (
        rule.rule or "(no rule)", rule.spec, " ".join(map(str, rule.shapes)),
        str(rule.variables), str(rule.outputs), human_bytes(rule.bytes_here),
        human_bytes(rule.bytes_full), rule.reason,
    )  # fmt: skip


def plan_report(
    policy: str,
    mesh: Mesh,
    variables: Iterable[VariableSize],
    outputs: Iterable[str],
    rules: PathRules[tuple[DimSpec, ...]],
    reasons: Mapping[str, str],
) -> PlanReport:
    """Sums up rules, specs by keys, over the variables and the outputs of these paths.

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


@attrs.frozen
class MemoryReport(Report):
    """The memory that a rank takes in a train step, as the first steps of `fit` are.

    Args:
        policy: The policy's name.
        mesh: The mesh as text.
        model: The model's name.
        step: The bytes by kind at the highest point of the step.
        checkpoint: The bytes that the rank copies to write its part of a sharded checkpoint.
        in_slices: Whether it is the program by which `fit` runs a step with large outputs, for some
            rows at a time where that is proven to be the same (ADR 60); else it is an eager step.

    Example:
        >>> step = {"variables": 100, "optimizer": 200, "gradients": 100, "activations": 50}
        >>> report = MemoryReport("tensor_parallel", "(data=1, model=2)", "net", step, 300)
        >>> report.kept, report.step_peak, report.checkpoint_peak
        (300, 450, 600)
    """

    derived = ("kept", "step_peak", "checkpoint_peak")
    policy: str
    mesh: str
    model: str
    step: Mapping[Kind, int]
    checkpoint: int
    in_slices: bool = False

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
        slices = ", its outputs in slices where possible" if self.in_slices else ""
        title = (
            f"a train step of model {self.model!r}{slices}: policy {self.policy}, mesh {self.mesh}"
        )
        return build(title, MEMORY_COLUMNS, rows, width)
