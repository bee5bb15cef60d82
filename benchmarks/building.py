"""The memory of a rank that builds, saves, loads or quantizes a model, against its shards."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.rows import Row
from shardcore.testing import RankFailed, run_ranks

RANKS = 2
WIDTH = 2048
LIMIT = 1.15
TIMEOUT = 600.0


def rows(quick: bool, strategy: str) -> Iterator[Row]:
    """Yields the peak of the fuller rank, against its shards and the largest variable."""
    blocks = 4 if quick else 48  # of 16 MiB; beside an embedding of a quarter of the model
    section = f"build and load, {blocks * 16 * 4 // 3} MiB, two ranks"
    yield from _rows(section, partial(_measure, blocks=blocks), strategy)


def preset_rows(quick: bool, strategy: str) -> Iterator[Row]:
    """Yields the peak of the fuller rank while keras-hub reads a preset from a folder."""
    section = "from_preset of a Llama, two ranks"
    if find_spec("keras_hub") is None:
        yield Row(section, "peak", note="needs keras-hub: run it with .venv-hub, of make hub")
        return
    yield from _rows(section, partial(_measure_presets, blocks=1 if quick else 3), strategy)


def _rows(section: str, measure: Callable[..., "Peaks"], strategy: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="shardcore-bench-") as folder:
        program = partial(measure, strategy=strategy, folder=Path(folder))
        try:
            found = run_ranks(program, RANKS, timeout=TIMEOUT)
        except RankFailed as failed:
            yield Row(section, "peak", note=str(failed).strip().splitlines()[-1])
            return
    for what in found[0]:
        peak, bound = max((each[what] for each in found), key=lambda figures: figures[0])
        yield Row(section, what, peak, "B", "shards + largest variable", peak / bound, LIMIT)


# By what was done: the peak, and its bound.
Peaks = dict[str, tuple[int, int]]


def _begin(strategy: str, rules_on: Callable[[Any], Any]) -> None:
    """Distributes models by the rules on a mesh of two ranks, and begins to count memory."""
    import keras

    import shardcore

    shardcore.install(strategy)
    rules = rules_on(keras.distribution.DeviceMesh((1, RANKS), ("data", "model")))
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )
    memory.map_large_blocks()
    keras.random.uniform((10,))
    memory.begin()


def _noted(found: Peaks, what: str, model: Any, act: Callable[[Any], Any]) -> Any:
    """Returns the model after `act`, whose bound is the larger one of before and after."""
    before, after = _bound(model), []
    peak = memory.peak(lambda: after.append(act(model)))["process"]
    model = model or after[0]
    found[what] = peak, max(before, _bound(model))
    return model


def _measure(_rank: int, blocks: int, strategy: str, folder: Path) -> Peaks:
    import keras

    _begin(strategy, _columns)
    found: Peaks = {}
    note = partial(_noted, found)
    model = note("Model(...)", None, lambda _: _model(blocks))
    for name in ("weights.h5", "weights.json"):
        path, most = folder / f"model.{name}", 0.3 if name.endswith("json") else None
        save = partial(keras.Model.save_weights, filepath=path, max_shard_size=most)
        note(f"save_weights to .{name}", model, save)
        note(f"load_weights of .{name}", model, lambda model: model.load_weights(path))  # noqa: B023
    path = folder / "model.keras"
    note("save to .keras", model, lambda model: model.save(path))
    note("load_weights of .keras", model, lambda model: model.load_weights(path))
    model.compile("adam", "mse")
    note("optimizer.build", model, lambda model: model.optimizer.build(model.trainable_variables))
    del model
    model = note("load_model", None, lambda _: keras.saving.load_model(path))
    note("quantize to int8", model, lambda model: model.quantize("int8"))
    del model
    model = note("load_model again", None, lambda _: keras.saving.load_model(path))
    note("enable_lora", model, lambda model: [each.enable_lora(4) for each in model.layers])
    return found


def _measure_presets(_rank: int, blocks: int, strategy: str, folder: Path) -> Peaks:
    from keras_hub.models import LlamaBackbone

    _begin(
        strategy,
        partial(
            LlamaBackbone.get_layout_map,
            model_parallel_dim_name="model",
            data_parallel_dim_name="data",
        ),
    )
    found: Peaks = {}
    note = partial(_noted, found)
    sizes = {"num_query_heads": 16, "num_key_value_heads": 16, "intermediate_dim": 5632}
    model = note(
        "LlamaBackbone(...)",
        None,
        lambda _: LlamaBackbone(32000, blocks, hidden_dim=WIDTH, **sizes),
    )
    presets = {"one file": 10, "files of 0.3 GB": 0.3}
    for name, most in presets.items():
        path = str(folder / name)
        save = partial(LlamaBackbone.save_to_preset, preset_dir=path, max_shard_size=most)
        note(f"save_to_preset, {name}", model, save)
    del model
    for name in presets:
        read = partial(LlamaBackbone.from_preset, str(folder / name))
        note(f"from_preset, {name}", None, lambda _: read())  # noqa: B023
    return found


def _columns(mesh: Any) -> Any:
    import keras

    rules = keras.distribution.LayoutMap(mesh)
    rules[".*(kernel|embeddings)"] = (None, "model")
    return rules


def _model(blocks: int) -> Any:
    import keras

    vocabulary = blocks * WIDTH // 3  # a third of the blocks' weights
    hidden = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(blocks)]
    return keras.Sequential(
        [keras.Input((4,), dtype="int32"), keras.layers.Embedding(vocabulary, WIDTH), *hidden]
    )


def _bound(model: Any) -> int:
    """The shards of this rank, of the optimizer too, and the largest variable."""
    if model is None:
        return 0
    optimizer = model.optimizer.variables if model.compiled else []
    kept = [each._value for each in (*model.variables, *optimizer)]
    return sum(map(memory.storage_bytes, kept)) + max(each.nbytes for each in kept)
