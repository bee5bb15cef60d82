"""Which rule of the layout map each variable and output got, and the warnings about it."""

import logging
from typing import Any

from shardcore.binding.layout_map import rules_of
from shardcore.binding.session import Session
from shardcore.domain.path_report import RulesReport

logger = logging.getLogger("shardcore.rules")


def rules_report(model: Any, session: Session) -> RulesReport | None:
    """Which rule each variable and output got; None where no layout map is used."""
    layout_map = getattr(session.distribution, "_layout_map", None)
    if layout_map is None:
        return None
    rules = rules_of(layout_map)
    paths = [variable.path for variable in model.variables]
    outputs = [path for path in session.output_paths if rules.match(path)]
    return rules.report([*paths, *sorted(outputs)])


def warn_of_rules(model: Any, session: Session) -> None:
    """One warning for rules that match nothing and for variables without a rule."""
    if model in session.warned:
        return
    session.warned.add(model)
    report = rules_report(model, session)
    if report is None:
        return
    for rule in report.unused_rules:
        logger.warning(
            "Layout map: rule %r matches no variable and no output of the model%s",
            rule,
            ": " + report.hints[rule] if rule in report.hints else "",
        )
    unmatched = report.unmatched_paths
    if unmatched:
        logger.warning(
            "Layout map: %d of %d variables match no rule and are replicated: %s%s. "
            "shardcore.rules_report(model) lists all.",
            len(unmatched),
            len(model.variables),
            ", ".join(unmatched[:4]),
            ", ..." if len(unmatched) > 4 else "",
        )
