"""The cases in which a rank sends more than under XLA, each with its reason."""

from collections.abc import Iterator, Sequence

from attrs import frozen

from benchmarks.traffic.comparison import ratio
from benchmarks.traffic.table import Compared

# The reason of a case that has none yet.
UNKNOWN = "not explained yet"


@frozen
class Reason:
    """The reason of cases that are above XLA on a mesh.

    Attributes:
        mesh: Its name.
        cases: Their names.
        why: The reason, and what it would cost to change it.
    """

    mesh: str
    cases: tuple[str, ...]
    why: str


REASONS = (
    Reason(
        "2x1",
        ("Dense/mixed_float16", "BatchNormalization/mixed_float16"),
        "on a CPU Keras multiplies float16 in float32, and the gradient is summed before it is "
        "rounded to float16, as one device rounds the sum; XLA sums what is rounded",
    ),
    Reason(
        "2x1",
        ("ContrastLimitedAdaptiveHistogramEqualization",),
        "it looks each pixel up in one table of all images, by numbers that are computed, so that "
        "the table is gathered",
    ),
    Reason(
        "2x1",
        ("MixUp",),
        "its batch is put in another order, for which the images are sharded by their channels and "
        "then by the batch again; XLA's figure leaves out the turns of a loop",
    ),
    Reason(
        "2x1",
        ("BatchNormalization/masked",),
        "the moving mean and variance follow sums that are pending, and the layer reads the same "
        "sums: each is reduced twice, which is three times the number of channels",
    ),
    Reason(
        "2x1",
        ("Resizing/pad",),
        "its operator has a private name in torch, and no rule: its images are gathered",
    ),
    Reason(
        "1x2",
        ("ConvLSTM3D",),
        "Keras copies what a cell reads, or pads it, once for each of its four gates, and each "
        "copy is gathered; XLA finds that the copies are one, and gathers a state before it is "
        "padded. A recorded step could leave out calls that are equal, but calls with the sizes "
        "of a shard may be equal on one rank alone, and all ranks must make the same collectives",
    ),
    Reason(
        "1x2",
        ("BatchNormalization/mixed_float16",),
        "on a CPU Keras multiplies float16 in float32: the product reads an input in float32, and "
        "to gather that sends more than to gather the gradient of its kernel; XLA gathers the "
        "input while it is in float16",
    ),
)


def lines(mesh: str, strategies: Compared, reasons: Sequence[Reason] = ()) -> Iterator[str]:
    """List the cases whose default step sends more than XLA's on a mesh, by their reasons.

    Args:
        mesh: Its name.
        strategies: Their rows.
        reasons: Of all meshes.

    Raises:
        ValueError: If a reason is given for a case that is not above XLA.
    """
    above = above_xla(strategies)
    known = [each for each in reasons if each.mesh == mesh]
    explained = {case for each in known for case in each.cases}
    if stale := sorted(explained - set(above)):
        raise ValueError(f"{', '.join(stale)}: not above XLA on {mesh}; take the reason out")
    known.append(Reason(mesh, tuple(case for case in above if case not in explained), UNKNOWN))
    for each in known:
        if each.cases:
            names = ", ".join(f"`{case}`" for case in each.cases)
            yield f"- {names}: {each.why}."


def above_xla(strategies: Compared) -> list[str]:
    """Name the cases that are above XLA under any strategy.

    Example:
        >>> from benchmarks.traffic.sent_bytes import Traffic
        >>> from benchmarks.traffic.comparison import Row
        >>> def row(case, sent):
        ...     return Row(case, Traffic(8.0), Traffic(sent), Traffic(sent), True)
        >>> above_xla({"dtensor": [row("Dense", 8.0), row("GRU", 9.0)]})
        ['GRU']
    """
    found = (row for rows in strategies.values() for row in rows)
    return list(dict.fromkeys(row.case for row in found if ratio(row.default, row.xla) > 1))
