"""Measures one run, for the demo to compare."""

import json
import os
from pathlib import Path

import numpy as np

from shardcore.testing import count_collectives


def report(model, history, x, y, folder):
    """Write this rank's facts and the full weights. All ranks call it together."""
    rank = os.environ.get("RANK", "0")
    np.savez(Path(folder, f"weights-{rank}.npz"), *model.get_weights())
    facts = {
        "loss": history.history["loss"],
        "variables": stored(model.variables),
        "optimizer": stored(model.optimizer.variables),
        "collectives": collectives(lambda: model.train_on_batch(x, y)),
    }
    Path(folder, f"facts-{rank}.json").write_text(json.dumps(facts))


def stored(variables):
    """The bytes that this rank's memory holds of `variables`, and the bytes of their values."""
    tensors = [variable.value.detach() for variable in variables]
    return {
        "here": sum(local(tensor).untyped_storage().nbytes() for tensor in tensors),
        "whole": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def collectives(step):
    """Counts the collectives that this rank starts in a captured `step`, by kind."""
    for _ in range(2):
        step()
    with count_collectives() as traffic:
        step()
    return dict(traffic.calls)
