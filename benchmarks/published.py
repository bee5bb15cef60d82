"""Published throughputs of large models beside predicted ones: `python -m benchmarks.published`.

Only ratios of the rows of one table are compared: a prediction is for the rates of data sheets,
which no kernel reaches.
"""

from collections.abc import Callable, Sequence

import attrs
import keras
import numpy as np
from keras import layers

from benchmarks.models import Block
from shardcore.binding.cost.plan import facts_of
from shardcore.bootstrap.cost import machines, search
from shardcore.bootstrap.cost.repeats import Repeats, trace_steps
from shardcore.bootstrap.cost.traces import PlannedCandidate, TraceRequest
from shardcore.domain.cost.rank_step import cost_of
from shardcore.domain.layouts.mesh import Mesh
from shardcore.policies.candidates import Candidate


@attrs.frozen
class Row:
    """A row of a published table.

    Args:
        name: The model.
        build: Makes it.
        length: The tokens of a row of the batch.
        layout: The policy and the mesh.
        rows: The rows of the batch.
        tokens: The published tokens a second and GPU.
    """

    name: str
    build: Callable[[], keras.Model]
    length: int
    layout: Candidate
    rows: int
    tokens: float

    def predicted(self, machine_name: str) -> float:
        """Returns the predicted tokens a second and GPU."""
        keras.utils.clear_session()
        machine = machines.find(machine_name)
        tokens = np.zeros((1, self.length), "int32")
        repeats = Repeats.of(facts_of(self.build, None))
        request = TraceRequest(self.build, (tokens, tokens), self.rows)
        planned = search.plan_candidate(
            self.layout, self.rows, machine, repeats.short, repeats.times
        )
        assert isinstance(planned, PlannedCandidate), planned
        ((step,),) = trace_steps([[planned]], request, machine, repeats)
        seconds = cost_of(step, machine).seconds
        return self.rows * self.length / self.layout.mesh.size / seconds


class LlamaBlock(layers.Layer):
    """Attention with grouped queries and a gated hidden layer, each beside a short cut."""

    def __init__(self, width: int, heads: int, hidden: int, **kwargs):
        super().__init__(**kwargs)
        self.attention_norm = layers.RMSNormalization(name="attention_norm")
        self.attention = layers.GroupQueryAttention(
            width // heads, heads, 8, use_bias=False, name="attention"
        )
        self.mlp_norm = layers.RMSNormalization(name="mlp_norm")
        self.gate = layers.Dense(hidden, activation="silu", use_bias=False, name="gate")
        self.up = layers.Dense(hidden, use_bias=False, name="up")
        self.down = layers.Dense(width, use_bias=False, name="down")

    def call(self, x):
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        normed = self.mlp_norm(x)
        return x + self.down(self.gate(normed) * self.up(normed))


def _model(
    length: int,
    vocabulary: int,
    width: int,
    blocks: Sequence[layers.Layer],
    norm: type[layers.Layer],
) -> keras.Model:
    """Returns a compiled decoder in bfloat16, without positions."""
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width, name="tokens")(tokens)
    for block in blocks:
        x = block(x)
    x = norm(name="last_norm")(x)
    logits = layers.Dense(vocabulary, use_bias=False, name="logits")(x)
    model = keras.Model(tokens, logits)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _llama(
    name: str, blocks: int, width: int, heads: int, hidden: int, groups: int, rows: int, tokens: int
) -> Row:
    """Returns a row of Llama 3: FSDP in `groups`, 8-way tensor parallelism, `rows` of a group."""

    def build() -> keras.Model:
        keras.config.set_dtype_policy("mixed_bfloat16")
        made = [LlamaBlock(width, heads, hidden, name=f"block_{n}") for n in range(blocks)]
        return _model(8192, 128256, width, made, layers.RMSNormalization)

    mesh = Mesh((1, groups, 8), ("replica", "shard", "model"))
    return Row(name, build, 8192, Candidate("hybrid_sharded", mesh, 2), rows * groups, tokens)


def _gpt(
    name: str, blocks: int, width: int, heads: int, model: int, devices: int, rows: int, flops: int
) -> Row:
    """Returns a row of GPT with `model`-way tensor parallelism, whose blocks are recomputed.

    `flops` are the published TFLOP/s and GPU, of which a step of `rows` takes
    `96 rows length blocks width**2 (1 + length / 6 width + vocabulary / 16 blocks width)`.
    """
    length, vocabulary = 2048, 51200

    def build() -> keras.Model:
        keras.config.set_dtype_policy("mixed_bfloat16")
        names = [f"block_{n}" for n in range(blocks)]
        with keras.RematScope(mode="list_of_layers", layer_names=names):
            made = [Block(width, heads, name=each) for each in names]
        return _model(length, vocabulary, width, made, layers.LayerNormalization)

    factor = 1 + length / (6 * width) + vocabulary / (16 * blocks * width)
    tokens = flops * 1e12 / (96 * blocks * width**2 * factor)
    mesh = Mesh((devices // model, model), ("data", "model"))
    policy = "data_parallel" if model == 1 else "tensor_parallel"
    return Row(name, build, length, Candidate(policy, mesh), rows, tokens)


# torchtitan's benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (commit b5bcd76), column
# "Vanilla TP", bfloat16.
TORCHTITAN = (
    _llama("Llama 3 8B", 32, 4096, 32, 14336, groups=8, rows=12, tokens=4378),
    _llama("Llama 3 70B", 80, 8192, 64, 28672, groups=32, rows=16, tokens=597),
)
# Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM", 2021 (arXiv:2104.04473), table 1: the rows without pipelines.
MEGATRON = (
    _gpt("GPT 1.7B", 24, 2304, 24, model=1, devices=32, rows=512, flops=137),
    _gpt("GPT 3.6B", 30, 3072, 32, model=2, devices=64, rows=512, flops=138),
    _gpt("GPT 7.5B", 36, 4096, 32, model=4, devices=128, rows=512, flops=142),
    _gpt("GPT 18B", 40, 6144, 48, model=8, devices=256, rows=1024, flops=135),
)


def main() -> None:
    """Prints published and predicted tokens a second, and the errors of the ratios."""
    for machine, rows in (("h100", TORCHTITAN), ("a100", MEGATRON)):
        first: float | None = None
        for row in rows:
            found = row.predicted(machine)
            first = first or found / row.tokens
            error = found / row.tokens / first - 1
            print(
                f"{row.name}: published {row.tokens:.0f}, predicted {found:.0f}; "
                f"ratio to the first row off by {error:+.0%}"
            )


if __name__ == "__main__":
    main()
