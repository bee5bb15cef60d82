"""A folder of Transformers: shardcore writes it by a map, and keras-hub reads it, sharded."""

import json
import re

import keras
import keras_hub
import numpy as np
import pytest
from keras import distribution

import shardcore
from shardcore.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("default")  # those of keras-hub are not ours
SIZES = {
    "num_query_heads": 4, "hidden_dim": 32, "intermediate_dim": 48, "num_key_value_heads": 2,
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 64,
}  # fmt: skip
INTO_HEADS = "(h d) m -> m h d"
NAMES = {
    "token_embedding/embeddings": "model.embed_tokens.weight",
    "token_embedding/reverse_embeddings": ("lm_head.weight", "o i -> i o"),
    "sequence_output_layernorm/scale": "model.norm.weight",
    "self_attention/query/kernel": ("self_attn.q_proj.weight", INTO_HEADS),
    "self_attention/key/kernel": ("self_attn.k_proj.weight", INTO_HEADS),
    "self_attention/value/kernel": ("self_attn.v_proj.weight", INTO_HEADS),
    "self_attention/attention_output/kernel": ("self_attn.o_proj.weight", "m (h d) -> h d m"),
    "feedforward_gate_dense/kernel": ("mlp.gate_proj.weight", "o i -> i o"),
    "feedforward_intermediate_dense/kernel": ("mlp.up_proj.weight", "o i -> i o"),
    "feedforward_output_dense/kernel": ("mlp.down_proj.weight", "o i -> i o"),
    "self_attention_layernorm/scale": "input_layernorm.weight",
    "feedforward_layernorm/scale": "post_attention_layernorm.weight",
}


def key_of(path):
    if path in NAMES:
        return NAMES[path]
    number, name = re.fullmatch(r"transformer_layer_(\d+)/(.*)", path).groups()
    key, pattern = NAMES[name] if isinstance(NAMES[name], tuple) else (NAMES[name], None)
    key = f"model.layers.{number}.{key}"
    return key if pattern is None else (key, pattern)


def distribute(shape):
    shardcore.install()
    mesh = distribution.DeviceMesh(shape, ("batch", "model"))
    rules = keras_hub.models.LlamaBackbone.get_layout_map(mesh)
    distribution.set_distribution(
        distribution.ModelParallel(layout_map=rules, batch_dim_name="batch")
    )


def build():
    return keras_hub.models.LlamaBackbone(vocabulary_size=64, num_layers=2, **SIZES)


def test_keras_hub_reads_what_a_map_has_written_and_the_map_reads_it_too(tmp_path):
    def write(_rank):
        distribute((2, 1))
        keras.utils.set_random_seed(1)
        model = build()
        shardcore.save_safetensors(model, tmp_path, key_of)
        return model.get_weights()

    def read(_rank):
        distribute((1, 2))
        hub = keras_hub.models.Backbone.from_preset(str(tmp_path))
        own = build()
        shardcore.load_safetensors(own, tmp_path, key_of)
        shares = [each.bytes_here / each.bytes_full for each in shardcore.verify(hub).variables]
        return hub.get_weights(), own.get_weights(), min(shares)

    written, _ = run_ranks(write, 2)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for by_hub, by_map, share in run_ranks(read, 2):
        assert share == 0.5
        for one, other, expected in zip(by_hub, by_map, written, strict=True):
            np.testing.assert_array_equal(one, expected)
            np.testing.assert_array_equal(other, expected)
