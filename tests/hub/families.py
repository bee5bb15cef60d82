"""The families of models that each policy is tried on: small images, short texts, few layers.

`tests.hub.models` has the models of keras-hub that its other table has. Here are the other families
of keras-hub whose smallest model is small, and those of keras.applications.
"""

from collections.abc import Callable
from typing import Any

import attrs
import keras
import numpy as np
from keras_hub import models as hub

from tests.hub.models import CASES, GEMMA, GROUPED, HEADS, LENGTH, SMALL, batch_for, case_of, causal
from tests.hub.models import Case as HubCase
from tests.matrix.cases.applications import APPLICATIONS
from tests.matrix.parity import Case as MatrixCase

ROWS = 4
TEXT = SMALL | HEADS
IMAGE = {"image_shape": (32, 32, 3)}
# It computes a product in float32, and fails in float64, with plain Keras too.
FLOAT32 = {"Qwen 3.5"}
VIT = {"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 2, "num_heads": 4}
VIT |= {"hidden_dim": 16, "intermediate_dim": 32}
MOE = {"num_experts": 4, "top_k": 2, "moe_intermediate_dim": 16}


@attrs.frozen
class Family:
    """A small model of a family, and a batch for it.

    Args:
        build: Builds the model, compiled with plain SGD.
        batch: Makes the inputs and targets of four rows.
    """

    build: Callable[[], Any]
    batch: Callable[[Any], tuple[Any, Any]]


def _of_applications(case: MatrixCase) -> Family:
    def build() -> Any:
        model = case.build()
        model.compile(keras.optimizers.SGD(1.0), model.loss)
        return model

    def batch(model: Any) -> tuple[Any, Any]:
        x, y = case.batch(np.random.default_rng(0), ROWS)
        return x, y

    return Family(build, batch)


def _of_hub(case: HubCase) -> Family:
    def build() -> Any:
        model = case.build()
        is_classifier = model.output_shape[-1] == 4
        losses = keras.losses
        loss = "mse" if is_classifier else losses.SparseCategoricalCrossentropy(from_logits=True)
        # Without what only tasks that generate text take, and would sample.
        named = {} if is_classifier else {"weighted_metrics": []}
        model.compile(keras.optimizers.SGD(1.0), loss, **named)
        return model

    return Family(build, batch_for)


def _pair(name: str, **config: Any) -> Family:
    """A model of images and texts: its output is a score of each image with each text."""
    sizes = {"vocabulary_size": 64, "embedding_dim": 16, "hidden_dim": 16, "num_layers": 2}
    sizes |= {"num_heads": 4, "intermediate_dim": 32, "max_sequence_length": LENGTH}

    def build() -> Any:
        keras.utils.set_random_seed(1)
        vision = getattr(hub, f"{name}VisionEncoder")(**VIT)
        words = getattr(hub, f"{name}TextEncoder")(**sizes)
        both = getattr(hub, f"{name}Backbone")(vision_encoder=vision, text_encoder=words, **config)
        model = keras.Model(both.inputs, both.output["vision_logits"], name="pairs")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1.0), loss)
        return model

    return Family(build, lambda model: (batch_for(model)[0], np.arange(ROWS)))


# Those that `tests.hub.models` does not have.
FURTHER = {
    "Llama": causal("Llama", **GROUPED),
    "Qwen": causal("Qwen", **GROUPED),
    "QwenMoe": causal("QwenMoe", **GROUPED, **MOE, shared_expert_intermediate_dim=16),
    "Falcon": causal("Falcon", num_attention_heads=4),
    "GPT-NeoX": causal("GPTNeoX", **HEADS, rotary_percentage=0.5, max_sequence_length=LENGTH),
    "Bloom": causal("Bloom", **HEADS),
    "RWKV7": case_of(
        "RWKV7",
        "CausalLM",
        vocabulary_size=64,
        hidden_size=16,
        head_size=8,
        num_layers=2,
        intermediate_dim=32,
        gate_lora=8,
        mv_lora=4,
        aaa_lora=4,
        decay_lora=4,
    ),
    "ALBERT": case_of("Albert", **TEXT, embedding_dim=8, max_sequence_length=LENGTH),
    "DistilBERT": case_of("DistilBert", **TEXT, max_sequence_length=LENGTH),
    "ELECTRA": case_of(
        "Electra",
        vocab_size=64,
        num_layers=2,
        embedding_dim=8,
        hidden_dim=16,
        intermediate_dim=32,
        **HEADS,
        max_sequence_length=LENGTH,
    ),
    "RoBERTa": case_of("Roberta", **TEXT, max_sequence_length=LENGTH),
    "RoFormer V2": case_of("RoformerV2", **TEXT, head_size=4),
    "ESM": case_of("ESM", **TEXT, max_sequence_length=LENGTH),
    "XLNet": case_of("XLNet", **TEXT),
    "T5Gemma": case_of(
        "T5Gemma",
        vocabulary_size=64,
        **{
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in {
                "hidden_dim": 16,
                "intermediate_dim": 32,
                "num_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "layer_types": ["full_attention"] * 2,
            }.items()
        },
    ),
    "PaliGemma": case_of(
        "PaliGemma",
        **SMALL,
        **GEMMA,
        image_size=16,
        vit_patch_size=8,
        vit_num_heads=4,
        vit_hidden_dim=16,
        vit_num_layers=2,
    ),
    "DeiT": case_of("DeiT", **VIT),
    "DINOv2": case_of("DINOV2", **VIT, position_embedding_shape=(16, 16, 3)),
    "ViTDet": case_of(
        "ViTDet",
        **IMAGE,
        hidden_size=16,
        num_layers=2,
        intermediate_dim=32,
        num_heads=4,
        global_attention_layer_indices=[1],
        patch_size=4,
        num_output_channels=8,
        window_size=4,
    ),
    "MiT": case_of(
        "MiT",
        **IMAGE,
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        hidden_dims=[8, 16],
    ),
    "VGG (keras-hub)": case_of(
        "VGG", **IMAGE, stackwise_num_repeats=[1, 1], stackwise_num_filters=[8, 16]
    ),
    "CSPNet": case_of(
        "CSPNet",
        **IMAGE,
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 2],
        stackwise_strides=[1, 2],
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        stage_type="csp",
        bottle_ratio=[0.5, 1.0],
        block_ratio=[1.0, 0.5],
        expand_ratio=[2.0, 1.0],
    ),
    "HGNetV2": case_of(
        "HGNetV2",
        **IMAGE,
        depths=[1, 2],
        embedding_size=8,
        hidden_sizes=[16, 32],
        stem_channels=[3, 8, 8],
        hidden_act="relu",
        use_learnable_affine_block=False,
        stackwise_stage_filters=[(8, 8, 16, 1, 1, 3), (16, 8, 32, 2, 1, 3)],
        apply_downsample=[False, True],
        use_lightweight_conv_block=[False, True],
    ),
}


FAMILIES = (
    {name: _of_hub(case) for name, case in (CASES | FURTHER).items() if name not in FLOAT32}
    | {"CLIP": _pair("CLIP", projection_dim=16), "SigLIP": _pair("SigLIP")}
    | {case.name: _of_applications(case) for case in APPLICATIONS}
)
