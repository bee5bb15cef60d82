"""What the matrix found, as counts and as a table of docs/coverage.md."""

from collections import Counter

import attrs

from tests.matrix.ops_run import Outcome

ORDER = ("ok", "fell back", "error", "WRONG")
BEGIN, END = "<!-- operators: generated -->", "<!-- end of operators -->"


@attrs.frozen
class Verdicts:
    """Counts per function, and a line for each outcome that is not right."""

    counts: dict[str, Counter[str]]
    lines: list[str]


def merge(ranks: list[list[tuple[str, str, Outcome]]]) -> Verdicts:
    """The worst of what the ranks say of each call."""
    counts: dict[str, Counter[str]] = {}
    lines = []
    for of_ranks in zip(*ranks, strict=True):
        name, call, _ = of_ranks[0]
        assert {each[1] for each in of_ranks} == {call}, "ranks ran different calls"
        worst = max((each[2] for each in of_ranks), key=lambda each: ORDER.index(each.verdict))
        counts.setdefault(name, Counter())[worst.verdict] += 1
        if worst.verdict in ("error", "WRONG"):
            lines.append(f"{worst.verdict} {name} {call}: {worst.detail}")
    return Verdicts(counts, lines)


def operator_table(counts: dict[str, Counter[str]]) -> str:
    """One row per function: the worst verdict, and how many calls came to which."""
    rows = [f"| {' | '.join(['function', 'verdict', *ORDER])} |", "|---" * 6 + "|"]
    for name, found in sorted(counts.items()):
        worst = max(found, key=ORDER.index)
        numbers = " | ".join(str(found[verdict]) for verdict in ORDER)
        rows.append(f"| `{name}` | {worst} | {numbers} |")
    return "\n".join(rows)


def with_table(text: str, table: str) -> str:
    """`text` with `table` between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
