"""Models of keras-hub over two ranks have the numbers and the tokens of one device.

A few cases; `python -m tests.hub` tries the others.
"""

import functools
import sys
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

import shardcore
from shardcore.binding import keras_private
from shardcore.binding.cost.facts import describe
from shardcore.domain.capture import State
from shardcore.domain.layouts.mesh import Mesh
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute as shard
from tests.hub.activities import compare, distribute
from tests.hub.models import CASES, prompt_for

# Those of keras-hub and Grain, which are not ours.
pytestmark = pytest.mark.filterwarnings("default")
MESH = Mesh((1, 2), ("data", "model"))
SAMPLERS = {
    "greedy": keras_hub.samplers.GreedySampler,
    "top k": lambda: keras_hub.samplers.TopKSampler(k=5, seed=1),
    "top p": lambda: keras_hub.samplers.TopPSampler(p=0.9, seed=1),
    "beam": lambda: keras_hub.samplers.BeamSampler(num_beams=2),
    "contrastive": lambda: keras_hub.samplers.ContrastiveSampler(k=3),
}


@pytest.mark.parametrize(
    ("name", "layout", "uses"),
    [
        ("OPT", "tensor_parallel", ("train", "generate", "lora")),
        ("Gemma", "layout map", ("train", "generate", "int8")),
        ("GPT-2", "data_parallel", ("generate", "bfloat16", "preset")),
        ("BERT", "fully_sharded", ("train",)),
    ],
)
def test_a_model_has_the_numbers_and_the_tokens_of_one_device(name, layout, uses):
    found = compare(name, layout, uses)
    assert found.keys() == set(uses)
    for use, outcome in found.items():
        assert outcome.is_close, f"{use}: {outcome}"
        assert not outcome.eager, f"{use}: {outcome}"


def test_a_plan_shards_all_large_variables_and_no_less_than_the_own_layout_map_of_a_model():
    wide = {"intermediate_dim": 64}  # with half of it, the hidden layers of Gemma are square

    def bytes_of_rank(variable, layout):
        return variable.bytes_here(layout.axes, MESH) if layout else variable.bytes

    for name, case in CASES.items():
        if not case.generates:
            continue
        build = functools.partial(case.build, **wide)
        report = shardcore.plan(build, MESH, small=0).report()
        assert report.bytes_here < report.bytes_full * 0.6, name
        if hasattr(case.backbone, "get_layout_map"):
            devices = keras.distribution.DeviceMesh(MESH.shape, MESH.axis_names, ["cpu:0", "cpu:1"])
            own = case.backbone.get_layout_map(devices, "model", "data")
            variables = describe(build()).all_variables()
            assert report.bytes_here <= sum(bytes_of_rank(v, own[v.path]) for v in variables), name


@pytest.mark.parametrize("stop", [None, (7, 9)])
def test_each_sampler_is_captured_and_gives_equal_tokens_on_all_ranks(stop):
    """The prompts have three and five tokens."""

    def program(rank, layout):
        if layout is not None:
            distribute(CASES["OPT"], layout)
        model = CASES["OPT"].build()
        tokens, states = {}, []
        for name, make in SAMPLERS.items():
            vars(model).pop(keras_private.LOOP_STEPS, None)
            model.compile(sampler=make())
            made = [model.generate(prompt_for(model), stop_token_ids=stop) for _ in range(3)]
            tokens[name] = [keras.ops.convert_to_numpy(each["token_ids"]) for each in made]
            for step in vars(model).get(keras_private.LOOP_STEPS, {}).values():
                states += [entry.progress.state for entry in step._entries.values()]
        return tokens, states

    (expected, _) = run_ranks(program, 1, None, timeout=300)[0]
    for layout in ("data_parallel", "tensor_parallel"):
        for tokens, states in run_ranks(program, 2, layout, timeout=300):
            assert set(states) == {State.CAPTURED}
            assert len(states) >= len(SAMPLERS)
            for name in SAMPLERS:
                np.testing.assert_array_equal(tokens[name], expected[name], err_msg=name)


def test_an_export_to_transformers_is_written_by_one_rank_with_the_bytes_of_one_device(tmp_path):
    def program(rank, layout, name):
        if layout is not None:
            distribute(CASES["GPT-2"], layout)
        folder, written = tmp_path / name.format(rank), []
        sys.addaudithook(lambda event, given: event == "open" and written.append(given[:2]))
        backbone = CASES["GPT-2"].build().backbone
        backbone.export_to_transformers(folder)
        names = {Path(file).name for file, mode in written if str(folder) in str(file)}
        return (folder / "model.safetensors").read_bytes(), sorted(names)

    files = ["config.json", "model.safetensors"]
    ((expected, _),) = run_ranks(program, 1, None, "alone", timeout=300)
    one, other = run_ranks(program, 2, "tensor_parallel", "shared", timeout=300)
    assert one == (expected, files)
    assert other == (expected, [])
    assert run_ranks(program, 2, "tensor_parallel", "{}", timeout=300) == [(expected, files)] * 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_export_that_one_rank_cannot_write_fails_on_all_ranks(name, tmp_path):
    (tmp_path / name).symlink_to("/dev/full")

    def program(rank):
        distribute(CASES["GPT-2"], "tensor_parallel")
        backbone = CASES["GPT-2"].build(vocabulary_size=4096).backbone
        with pytest.raises(OSError, match="No space left on device"):
            backbone.export_to_transformers(tmp_path)
        return backbone.predict(prompt_for(backbone), verbose=0).shape

    assert len(run_ranks(program, 2, timeout=300)) == 2


def test_a_backbone_with_a_resized_vocabulary_loads_again(tmp_path):
    def program(rank):
        shard((1, 2), {"token_embedding/embeddings": ("model", None)})
        keras.utils.set_random_seed(1)
        sizes = {"num_query_heads": 2, "num_key_value_heads": 2, "hidden_dim": 8}
        model = keras_hub.models.LlamaBackbone(
            vocabulary_size=11, num_layers=1, intermediate_dim=16, **sizes
        )
        ids = np.arange(8).reshape(1, 8)
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        before = np.array(model(inputs))
        shardcore.resize(model.token_embedding, 14, model=model)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        return before, np.array(model(inputs)), np.array(loaded(inputs)), loaded.vocabulary_size

    for before, after, of_loaded, size in run_ranks(program, 2):
        np.testing.assert_array_equal(after, before)
        np.testing.assert_allclose(of_loaded, before, atol=1e-6)
        assert size == 14
