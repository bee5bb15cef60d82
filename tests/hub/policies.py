"""Tries policies on a family of models: one training step on two ranks beside one device.

.venv-hub/bin/python -m tests.hub.policies --family BERT --policy fully_sharded
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs  # after the backend is named
import keras
import numpy as np
from keras.src.backend.common import dtypes

import shardcore
from shardcore.binding.cost.facts import describe
from shardcore.domain.errors import PolicyError
from shardcore.testing import RankFailed, run_ranks
from tests.hub import policy_page
from tests.hub.families import FAMILIES, Family
from tests.matrix.forks import Ended, run_all

# The mesh of two ranks on which each policy is tried; "auto" chooses its own.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]] | None] = {
    "data_parallel": ((2,), ("data",)),
    "fully_sharded": ((2,), ("data",)),
    "hybrid_sharded": ((1, 2), ("replica", "shard")),
    "tensor_parallel": ((1, 2), ("data", "model")),
    "sequence_parallel": ((1, 2), ("data", "model")),
    "context_parallel": ((1, 2), ("data", "seq")),
    "expert_parallel": ((2,), ("data",)),
    "per_layer": ((1, 2), ("replica", "shard")),
    "auto": None,
}
# Keras computes means and norms of float64 in float32; with this in float64.
dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
# In float64 a difference of rounding is below it, and a fault above it. Some layers of keras-hub
# compute in float32 all the same.
CLOSE = 1e-6
SECONDS = 400  # for one policy
ORDER = ("ok", "refused", "wrong", "error")


@attrs.frozen
class Outcome:
    """The outcome of a policy on a family, on one rank.

    Args:
        status: One of `ORDER`.
        detail: The share of the variables that a rank holds, or what was refused or differs.
        bytes_here: The bytes of the variables that this rank stores.
        planned: Those of the fullest rank, as the plan says.
    """

    status: str
    detail: str
    bytes_here: int = 0
    planned: int = 0


def compare(name: str, policies: list[str]) -> dict[str, Outcome]:
    """Runs a family on one device, then with each policy on two ranks.

    Raises:
        RankFailed: If it fails on one device.
    """
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder) / "expected.npz"
        run_ranks(lambda rank: np.savez(expected, **_step(family)[1]), 1, timeout=SECONDS)
        results = run_all(
            {policy: policy for policy in policies},
            2,
            lambda rank: lambda policy: _try(family, policy, expected),
            lambda outcome: outcome.status == "error",
            SECONDS,
        )
    return {policy: _of_ranks(result) for policy, result in results.items()}


def _of_ranks(result: list[Outcome] | Ended) -> Outcome:
    if isinstance(result, Ended):
        return Outcome("error", _last_line(result.why))
    worst = max(result, key=lambda outcome: ORDER.index(outcome.status))
    fullest = max(outcome.bytes_here for outcome in result)
    if worst.status == "ok" and fullest != worst.planned:
        return Outcome("wrong", f"a rank stores {fullest} bytes, the plan says {worst.planned}")
    return worst


def _try(family: Family, policy: str, expected: Path) -> Outcome:
    """Plans, distributes, trains a step, and compares it with the one of one device."""
    keras.utils.clear_session()
    keras.distribution.set_distribution(None)
    try:
        shardcore.install()
        plan = _plan(family, policy)
        plan.distribute()
        model, values = _step(family)
        report = shardcore.verify(model)
    except PolicyError as error:
        return Outcome("refused", _one_line(error))
    except Exception as error:  # noqa: BLE001 - whatever a model raises is its outcome
        return Outcome("error", f"{type(error).__name__}: {_one_line(error)}")
    if difference := _difference(values, np.load(expected)):
        return Outcome("wrong", difference)
    if not report.ok:
        return Outcome("wrong", _one_line(report))
    # No plan has the state of a seed generator.
    paths = {v.path for v in model.variables if not v.path.endswith("seed_generator_state")}
    here = sum(each.bytes_here for each in report.variables if each.path in paths)
    made = plan.report()
    share = f"{made.bytes_here / made.bytes_full:.2f}"
    chosen = "" if policy == plan.policy else f": {plan.policy} {plan.mesh}"
    return Outcome("ok", share + chosen, here, made.bytes_here)


def _plan(family: Family, policy: str) -> Any:
    if policy == "auto":
        keras.config.set_floatx("float64")
        batch = family.batch(family.build())
        keras.utils.clear_session()
        return shardcore.plan(_built(family), devices=2, policy="auto", batch=batch)
    options: dict[str, Any] = {} if policy == "data_parallel" else {"small": 0}  # the models are
    if policy == "per_layer":
        layers = describe(_built(family)()).layers()
        paths = [layer.path for layer in layers if layer.variables and layer.path]
        keras.utils.clear_session()
        options["layers"] = dict.fromkeys(paths[::2], "fully_sharded")
    mesh = MESHES[policy]
    assert mesh is not None
    return shardcore.plan(_built(family), keras.distribution.DeviceMesh(*mesh), policy, **options)


def _built(family: Family) -> Callable[[], Any]:
    """Returns a function that builds the model in float64, with the same first values each time."""

    def build() -> Any:
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)
        return family.build()

    return build


def _step(family: Family) -> tuple[Any, dict[str, np.ndarray]]:
    """Trains a step: the model, its loss, and each variable before and after it."""
    model = _built(family)()
    batch = family.batch(model)
    values = {f"before {v.path}": keras.ops.convert_to_numpy(v) for v in model.variables}
    values["loss"] = np.asarray(model.train_on_batch(*batch))
    values |= {v.path: keras.ops.convert_to_numpy(v) for v in model.variables}
    return model, values


def _difference(values: dict[str, np.ndarray], expected: Any) -> str:
    """Describes the largest difference of the loss or of an update, relative to its size.

    Plain SGD adds the gradient to a variable. That of a bias before a norm is zero in theory, and
    noise in practice: beside the largest of all it is nothing.
    """
    if values.keys() != set(expected.files):
        return f"other variables: {sorted(values.keys() ^ set(expected.files))[:3]}"
    updates = {path: _update(expected, path) for path in values if not path.startswith("before ")}
    floor = CLOSE * max(abs(update).max(initial=0) for update in updates.values())
    apart = {
        path: float(abs(values[path] - expected[path]).max(initial=0))
        / (float(abs(update).max(initial=0)) + floor)
        for path, update in updates.items()
    }
    worst = max(apart, key=lambda path: np.nan_to_num(apart[path], nan=np.inf))
    return "" if apart[worst] <= CLOSE else f"{worst}: {apart[worst]:.1e}"


def _update(values: Any, path: str) -> np.ndarray:
    before = values[f"before {path}"] if path != "loss" else 0
    return np.asarray(values[path].astype("float64") - before)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def main() -> int:
    """Returns 1 if a number is wrong or a policy fails."""
    parser = argparse.ArgumentParser("python -m tests.hub.policies", description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="else all of them")
    parser.add_argument("--policy", choices=MESHES, action="append", help="else all of them")
    parser.add_argument(
        "--page", action="store_true", help="write docs/reference/policies.md alone"
    )
    options = parser.parse_args()
    bad = 0
    for name in [] if options.page else options.family or FAMILIES:
        try:
            outcomes = compare(name, options.policy or list(MESHES))
        except RankFailed as error:
            outcomes = {"one device": Outcome("error", _last_line(str(error)))}
        for policy, outcome in outcomes.items():
            policy_page.keep(name, policy, outcome.status, outcome.detail)
            print(f"{name} | {policy} | {outcome.status} | {outcome.detail}", flush=True)
            bad += outcome.status in ("wrong", "error")
    policy_page.write(list(FAMILIES), list(MESHES))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
