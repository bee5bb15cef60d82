"""Reports and warnings about the rules of the layout map that variables and outputs got."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from keras import Model, Variable
from keras.distribution import ModelParallel

from shardcore.binding import keras_private
from shardcore.binding.cost.plan import Plan
from shardcore.binding.keras_private import is_seed, storage_of
from shardcore.binding.layouts import rules_of
from shardcore.binding.ranks.session import Session
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.path_rules import Match, RulesReport
from shardcore.reporting.logs import log_of

logger = log_of("rules")


def rules_report(model: Model, session: Session) -> RulesReport | None:
    """Matches the rules with variables and outputs; None without a layout map."""
    layout_map = keras_private.layout_map_of(session.distribution)
    if layout_map is None:
        return None
    rules = rules_of(layout_map)
    # The state of a seed generator is two numbers; a rule may name it, and none has to.
    paths = [v.path for v in model.variables if not is_seed(v) or rules.match(v.path)]
    outputs = [path for path in session.output_paths if rules.match(path)]
    report = rules.report([*paths, *sorted(outputs)])
    stale = [variable for variable in model.variables if stale_rule(variable, session)]
    decided = {variable.path: storage_of(variable).rule_key for variable in stale}
    return _as_decided(report, decided)


def stale_rule(variable: Variable, session: Session) -> str | None:
    """Writes the warning for a variable whose rules have changed since it was built; None else."""
    built = storage_of(variable)
    if not built.is_ruled:
        return None
    now = session.rule(variable.path)
    if _layout(built.rule) == _layout(now):
        return None
    what = (
        "after the variable was built: it changed nothing; build the model again, or "
        "shardcore.distribute_variable(variable, layout)"
    )
    if now is None:
        return f"rule {built.rule_key!r} was taken away {what}"
    return f"rule {now.key!r} was {'changed' if built.rule_key == now.key else 'added'} {what}"


def _layout(rule: Match[Any] | None) -> Layout | None:
    layout: Layout | None = None if rule is None else rule.value.backend_layout
    return None if layout is None or layout.is_replicated else layout


def _as_decided(report: RulesReport, decided: Mapping[str, str | None]) -> RulesReport:
    """Replaces rules that were added too late by those that decided."""
    if not decided:
        return report
    undecided = {path: key for path, key in report.matched.items() if path not in decided}
    matched = undecided | {path: key for path, key in decided.items() if key is not None}
    late = [report.matched[path] for path in decided if path in report.matched]
    idle = [key for key in dict.fromkeys(late) if key not in matched.values()]
    return attrs.evolve(
        report,
        matched=matched,
        unused_rules=(*report.unused_rules, *idle),
        unmatched_paths=tuple(
            path for path in [*report.matched, *report.unmatched_paths] if path not in matched
        ),
        hints={**report.hints, **dict.fromkeys(idle, "it came after the variables were built")},
    )


def check_plan(model: Model, session: Session) -> None:
    """Refuses a plan that was made for other variables than `model` has."""
    layout_map = keras_private.layout_map_of(session.distribution)
    if isinstance(layout_map, Plan):
        layout_map.check(model.name, [variable.path for variable in model.variables])


def warn_of_rules(model: Model, session: Session) -> None:
    """Warns of variables without a rule, and once of rules that no model has used so far.

    Where a method of the user gives the layouts, rules decide nothing.
    """
    report = rules_report(model, session)
    if report is None or _overrides_layouts(session.distribution):
        return
    used = _used_rules(report, session)
    unused = [rule for rule in report.unused_rules if rule not in used]
    new = [rule for rule in unused if f"unused {rule}" not in session.warnings]
    session.warnings.update(f"unused {rule}" for rule in new)
    if unused and not used:
        _warn_of_all_rules(model, report)
        return
    for rule in new:
        logger.warning(
            "Layout map: rule %r matches no variable and no output of the models so far%s",
            rule,
            ": " + report.hints[rule] if rule in report.hints else "",
        )
    unmatched = report.unmatched_paths
    if unmatched:
        logger.warning(
            "Layout map: %d of %d variables of model %r match no rule and are replicated: %s. "
            "shardcore.rules_report(model) lists all.",
            len(unmatched),
            len(unmatched) + len(report.matched),
            model.name,
            _first(unmatched),
        )


def _overrides_layouts(distribution: ModelParallel) -> bool:
    return type(distribution).get_variable_layout is not ModelParallel.get_variable_layout


def _used_rules(report: RulesReport, session: Session) -> set[str]:
    outputs = map(session.rule, session.output_paths)
    return {*report.matched.values(), *session.used_rules, *(rule.key for rule in outputs if rule)}


def _warn_of_all_rules(model: Model, report: RulesReport) -> None:
    """Warns that no rule matches: the whole model would be replicated."""
    hint = next(iter(report.hints.values()), None)
    logger.warning(
        "THE LAYOUT MAP SHARDS NOTHING: no rule (%s) matches a path of model %r (%s), so each "
        "rank has all of it. A rule must match a whole path, as '.*kernel' does%s. "
        "shardcore.rules_report(model) lists all paths.",
        _first([repr(rule) for rule in report.unused_rules]),
        model.name,
        _first(report.unmatched_paths),
        f": {hint}" if hint else "",
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
