"""Published throughputs of large models beside predicted ones: `python -m benchmarks.published`.

The source is torchtitan's benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md (commit b5bcd76),
column "Vanilla TP", bfloat16: tokens a second and GPU. Only ratios are compared: a prediction knows
neither the rates that kernels reach, nor recomputation.
"""

import keras
import numpy as np
from keras import layers

from shardcore.binding.planning.make_plan import facts_of
from shardcore.bootstrap import machines, search
from shardcore.bootstrap.repeats import Repeats, priced_steps
from shardcore.bootstrap.traces import PlannedCandidate, TraceRequest
from shardcore.domain.mesh import Mesh
from shardcore.domain.steps.cost import cost_of
from shardcore.policies.candidates import Candidate

LENGTH, VOCABULARY, KEY_HEADS = 8192, 128256, 8
AXES = ("replica", "shard", "model")
# Name, blocks, width, heads, hidden width, groups of FSDP, rows of a group, tokens a second.
ROWS = (
    ("Llama 3 8B", 32, 4096, 32, 14336, 8, 12, 4378.0),
    ("Llama 3 70B", 80, 8192, 64, 28672, 32, 16, 597.3),
)
TENSOR_PARALLEL = 8


class Block(layers.Layer):
    """Attention with grouped queries and a gated hidden layer, each beside a short cut."""

    def __init__(self, width: int, heads: int, hidden: int, **kwargs):
        super().__init__(**kwargs)
        self.attention_norm = layers.RMSNormalization(name="attention_norm")
        self.attention = layers.GroupQueryAttention(
            width // heads, heads, KEY_HEADS, use_bias=False, name="attention"
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


def llama(blocks: int, width: int, heads: int, hidden: int) -> keras.Model:
    """A compiled Llama 3 in bfloat16, without rotary positions."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, width, name="tokens")(tokens)
    for number in range(blocks):
        x = Block(width, heads, hidden, name=f"block_{number}")(x)
    x = layers.RMSNormalization(name="last_norm")(x)
    model = keras.Model(tokens, layers.Dense(VOCABULARY, use_bias=False, name="logits")(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def predicted(blocks: int, width: int, heads: int, hidden: int, groups: int, rows: int) -> float:
    """Returns the predicted tokens a second and GPU."""
    keras.utils.clear_session()
    machine = machines.find("h100")
    tokens = np.zeros((1, LENGTH), "int32")

    def build() -> keras.Model:
        return llama(blocks, width, heads, hidden)

    facts = facts_of(build, None)
    repeats = Repeats.of(facts)
    wanted = Candidate("hybrid_sharded", Mesh((1, groups, TENSOR_PARALLEL), AXES), 2)
    request = TraceRequest(build, (tokens, tokens), rows * groups)
    planned = search.with_rules(wanted, request.rows, machine, repeats.short, repeats.times)
    assert isinstance(planned, PlannedCandidate), planned
    ((step,),) = priced_steps([[planned]], request, machine, repeats)
    return request.rows * LENGTH / wanted.mesh.size / cost_of(step, machine).seconds


def main() -> None:
    """Prints published and predicted tokens a second, and their ratios to the first row."""
    first: tuple[float, float] | None = None
    for name, *sizes, measured in ROWS:
        found = predicted(*sizes)
        first = first or (measured, found)
        ratio, expected = found / first[1], measured / first[0]
        error = ratio / expected - 1
        print(f"{name}: published {measured:.0f}, predicted {found:.0f}; ratio off by {error:+.0%}")


if __name__ == "__main__":
    main()
