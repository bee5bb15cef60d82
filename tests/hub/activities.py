"""The uses of a model of keras-hub: each gives arrays to compare with one device."""

import functools
import logging
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import keras
import numpy as np

import shardcore
from shardcore.testing import run_ranks
from tests.hub.models import CASES, Case, batch_for, prompt_for

Arrays = dict[str, Any]
# How far float32 may be from one device, and bfloat16: sums are rounded in another order.
CLOSE = {"bfloat16": 0.05}


def _fit(model: keras.Model, steps: int = 4) -> list[float]:
    """Returns the losses of some steps; Adam's epsilon is large, so that no rounding is a step."""
    optimizer = keras.optimizers.Adam(0.01, epsilon=0.01)
    is_classifier = model.output_shape[-1] == 4
    loss = "mse" if is_classifier else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    named = {} if is_classifier else {"sampler": "greedy"}
    model.compile(optimizer, loss, **named, **({} if is_classifier else {"weighted_metrics": []}))
    x, y = batch_for(model)
    losses: list[float] = model.fit(x, y, batch_size=len(y), epochs=steps, verbose=0).history[
        "loss"
    ]
    return losses


def _tokens(model: keras.Model) -> Any:
    """Returns the tokens of `generate`, called three times: eagerly, recorded, captured."""
    model.compile(sampler="greedy")
    prompt = prompt_for(model)
    if keras.distribution.distribution() is not None:
        prompt = shardcore.ensure_dtensor_input(prompt)
    prompt = keras.tree.map_structure(keras.ops.convert_to_tensor, prompt)
    # Not `generate()`: that of Gemma 3 cannot join outputs that are None.
    generate = model.make_generate_function()
    found = [generate(prompt, stop_token_ids=None) for _ in range(3)]
    return [keras.ops.convert_to_numpy(next(iter(each.values()))) for each in found]


def train(case: Case, folder: Path) -> Arrays:
    """Trains, and predicts."""
    model = case.build()
    losses = _fit(model)
    x, _ = batch_for(model)
    return {"losses": losses, "outputs": [model.predict(x, verbose=0) for _ in range(3)]}


def generate(case: Case, folder: Path) -> Arrays:
    """Generates text."""
    return {"tokens": _tokens(case.build())}


def lora(case: Case, folder: Path) -> Arrays:
    """Trains LoRA weights, writes them, and reads them into another model."""
    model, other = case.build(), case.build()
    model.backbone.enable_lora(2)
    losses = _fit(model)
    model.backbone.save_lora_weights(str(folder / "model.lora.h5"))
    other.backbone.load_lora_weights(str(folder / "model.lora.h5"))
    x, _ = batch_for(model)
    return {
        "losses": losses,
        "loaded": other.predict(x, verbose=0),
        "outputs": model.predict(x, verbose=0),
    }


def int8(case: Case, folder: Path) -> Arrays:
    """Quantizes, and generates text."""
    model = case.build()
    model.quantize("int8")
    return {"tokens": _tokens(model)}


def bfloat16(case: Case, folder: Path) -> Arrays:
    """Trains in mixed precision."""
    return {"losses": _fit(case.build(dtype="mixed_bfloat16"))}


def preset(case: Case, folder: Path) -> Arrays:
    """Writes a preset into a folder, and reads it."""
    backbone = case.backbone(**case.config)
    backbone.save_to_preset(str(folder))
    other = type(backbone).from_preset(str(folder))
    pairs = zip(backbone.weights, other.weights, strict=True)
    names = {each.path: [keras.ops.convert_to_numpy(v) for v in (each, one)] for each, one in pairs}
    return {"is equal": [float(np.array_equal(*pair)) for pair in names.values()]}


ACTIVITIES: dict[str, Callable[[Case, Path], Arrays]] = {
    each.__name__: each for each in (train, generate, lora, int8, bfloat16, preset)
}
OF_TEXT = ("generate", "lora", "int8")
# The steps that each use runs often enough to be captured.
CAPTURED = {
    "train": ("train_step", "predict_step"),
    "generate": ("while_loop", "_build_cache"),
    "lora": ("train_step",),
    "int8": ("while_loop", "_build_cache"),
    "bfloat16": ("train_step",),
}

MESHES = {
    "data_parallel": (2, 1),
    "layout map": (1, 2),
    "tensor_parallel": (1, 2),
    "fully_sharded": (2, 1),
}


def is_offered(name: str, layout: str, activity: str) -> bool:
    """Returns whether a model has this layout and this use."""
    case = CASES[name]
    has_map = layout != "layout map" or hasattr(case.backbone, "get_layout_map")
    return has_map and (case.generates or activity not in OF_TEXT)


@attrs.frozen
class Outcome:
    """The outcome of a use.

    Args:
        difference: The largest difference from one device, relative to the largest value.
        eager: Why a step was not captured; empty if all were.
        is_close: Whether tokens are equal, and numbers close.
    """

    difference: float = 0.0
    eager: str = ""
    is_close: bool = True


def compare(name: str, layout: str, activities: tuple[str, ...]) -> dict[str, Outcome]:
    """Returns what came of the uses of a model over two ranks, beside one device."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(_run, 2, name, layout, activities, Path(folder), timeout=400)
    expected = alone(name, activities)
    return {
        use: _outcome(use, expected[use][0], [rank[use] for rank in ranks]) for use in activities
    }


@functools.cache
def alone(name: str, activities: tuple[str, ...]) -> dict[str, tuple[Arrays, str]]:
    """Returns what one device gives, which is the same beside every layout."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(_run, 1, name, None, activities, Path(folder), timeout=300)[0]


def _run(
    rank: int, name: str, layout: str | None, activities: tuple[str, ...], folder: Path
) -> dict[str, tuple[Arrays, str]]:
    """Returns for each use its arrays, and why it was not captured."""
    found = {}
    for each in activities:
        own = folder / each
        own.mkdir(parents=True, exist_ok=True)
        keras.utils.clear_session()
        messages = _Messages()
        logger = logging.getLogger("shardcore.capture")
        logger.addHandler(messages)
        logger.setLevel(logging.DEBUG)
        if layout is not None:
            distribute(CASES[name], layout)
        arrays = ACTIVITIES[each](CASES[name], own)
        logger.removeHandler(messages)
        found[each] = (arrays, "" if layout is None else messages.why_eager(CAPTURED.get(each, ())))
    return found


def distribute(case: Case, layout: str) -> None:
    """Sets the distribution of this layout, as a user would."""
    shardcore.install()
    mesh = keras.distribution.DeviceMesh(MESHES[layout], ("data", "model"))
    if layout == "layout map":
        rules = case.backbone.get_layout_map(mesh, "model", "data")
    else:
        small = {} if layout == "data_parallel" else {"small": 0}  # the models are
        rules = shardcore.plan(case.build, mesh, policy=layout, **small)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


class _Messages(logging.Handler):
    """Keeps which steps are captured, and the first reason why one is not."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.captured: set[str] = set()
        self.reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Reads one message."""
        message = record.getMessage()
        if why := re.search(r"not captured, so .*? numbers: (.*?)\. To silence", message):
            self.reason = self.reason or why[1]
        if step := re.match(r"(\w+) of .* is captured", message):
            self.captured.add(step[1])

    def why_eager(self, steps: tuple[str, ...]) -> str:
        """Returns why one of `steps` was not captured; empty if all were."""
        missing = [each for each in steps if each not in self.captured]
        return self.reason or (f"{missing[0]} was not captured" if missing else "")


def _outcome(use: str, expected: Arrays, ranks: list[tuple[Arrays, str]]) -> Outcome:
    worst, are_equal = 0.0, True
    for arrays, _ in ranks:
        for key, value in expected.items():
            one, other = (np.asarray(each, "float64") for each in (value, arrays[key]))
            largest = max(float(np.abs(one).max()), 1e-6)
            # Not `max`, which passes over NaN.
            worst = float(np.maximum(worst, np.abs(one - other).max() / largest))
            are_equal &= key != "tokens" or np.array_equal(one, other)
    eager = next((eager for _, eager in ranks if eager), "")
    return Outcome(worst, eager, bool(are_equal and worst <= CLOSE.get(use, 1e-4)))
