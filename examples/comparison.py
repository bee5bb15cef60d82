"""The runs of the demo side by side."""

import json
from pathlib import Path

import attrs
import numpy as np
from rich.table import Table

# Ranks add in another order, so the last bits differ. Weights differ more than losses: if a
# gradient is zero in theory (the bias of an attention key), Adam makes steps of rounding noise.
LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-3


@attrs.frozen
class Run:
    """One training: a list of facts and a list of full weights, each with an item per rank."""

    name: str
    ranks: list[dict]
    weights: list[list[np.ndarray]]

    @classmethod
    def read(cls, name, folder):
        facts = sorted(Path(folder).glob("facts-*.json"))
        weights = [np.load(path) for path in sorted(Path(folder).glob("weights-*.npz"))]
        ranks = [json.loads(path.read_text()) for path in facts]
        return cls(name, ranks, [list(each.values()) for each in weights])

    def loss_difference(self, other):
        """The largest difference of an epoch's loss from that of `other`, on any rank."""
        theirs = np.array(other.ranks[0]["loss"])
        return max(float(abs(np.array(rank["loss"]) - theirs).max()) for rank in self.ranks)

    def weight_difference(self, other):
        """The largest difference of an element from that of `other`, on any rank."""
        return max(
            float(abs(mine - theirs).max())
            for rank in self.weights
            for mine, theirs in zip(rank, other.weights[0], strict=True)
        )

    def to_dict(self, other):
        """The facts of the table as plain data, compared with `other`."""
        return {
            "name": self.name,
            "loss_difference": self.loss_difference(other),
            "weight_difference": self.weight_difference(other),
            "ranks": self.ranks,
        }

    def agrees_with(self, other):
        return (
            self.loss_difference(other) <= LOSS_TOLERANCE
            and self.weight_difference(other) <= WEIGHT_TOLERANCE
        )


def table(runs):
    """One column per run; the first is what the others are compared with."""
    one, *others = runs
    shown = Table(title="\nThe same model, the same first weights, the same data")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.name.replace(", tensor", "\ntensor").replace(", data", "\ndata"))
    for epoch in range(len(one.ranks[0]["loss"])):
        losses = [f"{run.ranks[0]['loss'][epoch]:.6f}" for run in runs]
        shown.add_row(f"loss of epoch {epoch + 1}", *losses)
    shown.add_section()
    losses = [f"{run.loss_difference(one):.1e}" for run in others]
    shown.add_row("difference, loss", "-", *losses)
    weights = [f"{run.weight_difference(one):.1e}" for run in others]
    shown.add_row("difference, weight", "-", *weights)
    shown.add_section()
    shown.add_row("variables on a rank", *(_bytes(run, "variables") for run in runs))
    shown.add_row("optimizer on a rank", *(_bytes(run, "optimizer") for run in runs))
    shown.add_section()
    shown.add_row("collectives a step", *map(_collectives, runs))
    return shown


def _bytes(run, what):
    """Returns the bytes of the rank that holds most."""
    here, whole = (max(rank[what][key] for rank in run.ranks) for key in ("here", "whole"))
    return f"{here / 2**20:.2f} of {whole / 2**20:.2f} MiB"


def _collectives(run):
    counts = run.ranks[0]["collectives"]
    named = [f"{count} {kind.replace('_', '-')}" for kind, count in counts.items()]
    return ", ".join(named) or "none"
