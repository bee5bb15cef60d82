"""Small models of keras-hub, and batches for them; nothing is downloaded."""

from typing import Any

import attrs
import keras
import numpy as np
from keras_hub import models
from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

LENGTH, WORDS, BATCH = 12, 64, 4
SMALL = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
HEADS = {"num_heads": 4, "dropout": 0.0}
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}
GEMMA = GROUPED | {"head_dim": 8}
EXPERTS = {"num_experts": 4, "top_k": 2}


@attrs.frozen
class Case:
    """A model of keras-hub.

    Args:
        backbone: The class of its backbone.
        config: The arguments of the backbone.
        task: The class of the task that generates text, None without one.
    """

    backbone: Any
    config: dict[str, Any]
    task: Any = None

    def build(self, **changes: Any) -> keras.Model:
        """Returns the task or, without one, the backbone with a layer over its output."""
        keras.utils.set_random_seed(1)
        backbone = self.backbone(**self.config | changes)
        if self.task is not None:
            return self.task(backbone=backbone, preprocessor=None)
        outputs = keras.tree.flatten(backbone.output)
        head = keras.layers.Dense(4, name="head")(outputs[0])
        of_sample = keras.ops.mean(head, axis=tuple(range(1, len(head.shape) - 1)))
        return keras.Model(backbone.inputs, of_sample, name="classifier")

    @property
    def generates(self) -> bool:
        """Whether it generates text."""
        return self.task is not None


def case_of(name: str, task: str = "", **config: Any) -> Case:
    """Returns the case of a backbone, and of its task if that is named."""
    backbone = getattr(models, f"{name}Backbone")
    return Case(backbone, config, getattr(models, f"{name}{task}") if task else None)


def causal(name: str, **config: Any) -> Case:
    """Returns the case of a causal language model."""
    return case_of(name, "CausalLM", **SMALL, **config)


CASES = {
    "OPT": causal("OPT", **HEADS, max_sequence_length=LENGTH),
    "GPT-2": causal("GPT2", **HEADS, max_sequence_length=LENGTH),
    "Llama 3": causal("Llama3", **GROUPED),
    "Gemma": causal("Gemma", **GEMMA),
    "Gemma 3": causal("Gemma3", **GEMMA, image_size=None),
    "Mistral": causal("Mistral", **GROUPED, sliding_window=8),
    "Qwen 3": causal("Qwen3", **GEMMA),
    "Phi-3": causal("Phi3", **GROUPED),
    "Mixtral": causal("Mixtral", **GROUPED, **EXPERTS),
    "Qwen3Moe": causal("Qwen3Moe", **GEMMA, **EXPERTS, moe_intermediate_dim=16),
    "GptOss": causal("GptOss", **GROUPED, **EXPERTS, sliding_window=8),
    "Qwen 3.5": causal(
        "Qwen3_5",
        **GEMMA,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        partial_rotary_factor=0.5,
    ),
    "Gemma 4": causal(
        "Gemma4", **GEMMA, image_size=None, sliding_window_size=8, sliding_window_pattern=2
    ),
    "SmolLM3": causal(
        "SmolLM3",
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True, False],
        layer_types=["full_attention"] * 2,
        mlp_bias=False,
        layer_norm_epsilon=1e-5,
        max_position_embeddings=64,
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    ),
    "Bart": case_of("Bart", "Seq2SeqLM", **SMALL, **HEADS, max_sequence_length=LENGTH),
    "T5": case_of("T5", **SMALL, **HEADS),
    "BERT": case_of("Bert", **SMALL, **HEADS, max_sequence_length=LENGTH),
    "DeBERTa": case_of("DebertaV3", **SMALL, **HEADS, max_sequence_length=LENGTH, bucket_size=4),
    "FNet": case_of("FNet", **SMALL, dropout=0.0, max_sequence_length=LENGTH),
    "Whisper": case_of(
        "Whisper",
        **SMALL,
        **HEADS,
        num_mels=8,
        max_encoder_sequence_length=2 * LENGTH,
        max_decoder_sequence_length=LENGTH,
    ),
    "ViT": case_of(
        "ViT",
        image_shape=(16, 16, 3),
        patch_size=(8, 8),
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        mlp_dim=32,
    ),
    "DINOv3": case_of(
        "DINOV3",
        image_shape=(16, 16, 3),
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=16,
        intermediate_dim=32,
    ),
    "Swin": case_of(
        "SwinTransformer",
        image_shape=(32, 32, 3),
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path=0.0,
    ),
    "ResNet": case_of(
        "ResNet",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(16, 16, 3),
    ),
    "Flux": case_of(
        "Flux",
        input_channels=8,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[2, 2, 4],
        theta=10000,
        use_bias=True,
        image_shape=(6, 8),
        text_shape=(4, 16),
        image_ids_shape=(6, 3),
        text_ids_shape=(4, 3),
        y_shape=(8,),
    ),
    "MMDiT": Case(
        MMDiT,
        {
            "patch_size": 2,
            "hidden_dim": 16,
            "num_layers": 2,
            "num_heads": 4,
            "position_size": 8,
            "latent_shape": (8, 8, 4),
            "context_shape": (6, 8),
            "pooled_projection_shape": (8,),
        },
    ),
}


def batch_for(model: keras.Model) -> tuple[Any, Any]:
    """Returns inputs and targets of a classifier, or of a language model."""
    rng = np.random.default_rng(0)
    x: Any = {}
    for each in model.inputs:
        name = each.name
        shape = (BATCH, *(LENGTH if size is None else size for size in each.shape[1:]))
        if "mask" in name:
            x[name] = np.ones(shape, "int32")
        elif "segment" in name:
            x[name] = np.zeros(shape, "int32")
        elif "int" in str(each.dtype):
            x[name] = rng.integers(1, WORDS, shape).astype("int32")
        else:
            x[name] = rng.normal(size=shape).astype("float32")
    if len(x) == 1:
        (x,) = x.values()
    if model.output_shape[-1] == WORDS:
        return x, rng.integers(1, WORDS, (BATCH, LENGTH)).astype("int32")
    return x, rng.normal(size=(BATCH, 4)).astype("float32")


def prompt_for(model: keras.Model) -> dict[str, Any]:
    """Returns prompts of three and of five tokens, with room for more."""
    tokens = np.random.default_rng(1).integers(1, WORDS, (BATCH, LENGTH)).astype("int32")
    given = np.arange(LENGTH)[None] < np.array([[3], [5], [3], [5]])
    prompt = {"token_ids": tokens * given, "padding_mask": given}
    names = [each.name for each in model.inputs]
    if "decoder_token_ids" in names:
        full = {"encoder_token_ids": tokens, "encoder_padding_mask": np.ones_like(given)}
        return full | {f"decoder_{name}": value for name, value in prompt.items()}
    return prompt
