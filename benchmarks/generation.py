"""Greedy generation with a cache of keys and values: plain Keras, under shardcore, or on JAX."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from attrs import frozen
from keras import ops

from benchmarks import keras_training
from benchmarks.cases import Case
from benchmarks.training import Training

TOKENS = 32  # that a call adds; half of the window of a decoder with a smaller one


def generate(
    case: Case, layout: str, device: str, strategy: str | None = None, **compile_arguments: Any
) -> "Generation":
    """The decoder of a case, ready to continue prompts; arguments are those of `train`."""
    training = keras_training.train(case, layout, device, strategy, **compile_arguments)
    length = case.sizes["length"]
    writer = Writer(training.model, length - min(TOKENS, length // 2), length)
    writer.compile(**compile_arguments)
    on_backend = _on_jax if keras.backend.backend() == "jax" else _on_torch
    return Generation(training, writer.given, on_backend(writer, layout))


def sums_alone(
    case: Case, layout: str, device: str, strategy: str | None = None, **compile_arguments: Any
) -> "SumsAlone":
    """The all-reduces of a call under Megatron's layout: two for each block and token."""
    generation = generate(case, layout, device, strategy, **compile_arguments)
    sizes = case.sizes
    calls = 1 + sizes["length"] - generation.given - 1  # the prompt, and all tokens but the first
    return SumsAlone(generation, 2 * sizes["blocks"] * calls, (case.batch, 1, sizes["width"]))


def _on_torch(writer: "Writer", layout: str) -> Callable[[Any], Any]:
    import torch

    import shardcore

    def tokens(prompts: Any) -> Any:
        with torch.no_grad():
            given = prompts if layout == "whole" else shardcore.ensure_dtensor_input(prompts)
            return writer.tokens(ops.convert_to_tensor(given))

    return tokens


def _on_jax(writer: "Writer", _layout: str) -> Callable[[Any], Any]:
    """Compiles a function of the values of all variables, as `generate()` of keras-hub does."""
    import jax

    def tokens(values: list[Any], prompts: Any) -> Any:
        with keras.StatelessScope(state_mapping=zip(writer.variables, values, strict=True)):
            return writer.tokens(prompts)

    compiled = jax.jit(tokens)

    def call(prompts: Any) -> Any:
        distribution = keras.distribution.distribution()
        if distribution is not None:
            layout = distribution.get_data_layout(prompts.shape)
            prompts = keras.distribution.distribute_tensor(prompts, layout)
        return compiled([each.value for each in writer.variables], prompts)

    return call


class Writer(keras.Model):
    """Continues prompts, by a loop like that of `generate()` of keras-hub.

    Args:
        decoder: A model of `models.decoder`.
        given: The tokens of a prompt.
        length: Its tokens at the end.
    """

    def __init__(self, decoder: keras.Model, given: int, length: int):
        super().__init__()
        self.decoder, self.given, self.length = decoder, given, length
        self.blocks = [each for each in decoder.layers if each.name.startswith("block_")]

    def tokens(self, prompts: Any) -> Any:
        """Returns prompts, and behind each the likeliest tokens."""
        rows, given, length = len(prompts), self.given, self.length
        logits, cache = self._build_cache(prompts)
        tokens = ops.pad(prompts, [[0, 0], [0, length - given]])
        tokens = ops.slice_update(tokens, [0, given], _likeliest(logits))

        def goes_on(tokens, cache, place):
            return place < length

        def add_token(tokens, cache, place):
            last = ops.slice(tokens, [0, place - 1], [rows, 1])
            logits, cache = self.with_cache(last, cache, place - 1)
            return ops.slice_update(tokens, [0, place], _likeliest(logits)), cache, place + 1

        first = ops.convert_to_tensor(given + 1)
        return ops.while_loop(goes_on, add_token, (tokens, cache, first))[0]

    def _build_cache(self, prompts: Any) -> tuple[Any, Any]:
        """Returns logits of the last token, and a cache with the prompts; named as in keras-hub."""
        attention = self.blocks[0].attention
        heads = attention.num_heads, attention.key_dim
        cache = ops.zeros((len(prompts), len(self.blocks), 2, self.length, *heads))
        return self.with_cache(prompts, cache, 0)

    def with_cache(self, tokens: Any, cache: Any, place: Any) -> tuple[Any, Any]:
        """Returns logits of the last token, and the cache with tokens that begin at `place`."""
        embeddings = self.decoder.get_layer("embeddings")
        places = place + ops.arange(tokens.shape[1])
        seen = ops.arange(cache.shape[3])[None] <= places[:, None]
        x = embeddings.token(tokens) + embeddings.position(places)
        caches = []
        for number, block in enumerate(self.blocks):
            normed = block.attention_norm(x)
            attended, kept = _attention(block.attention, normed, cache[:, number], place, seen)
            caches.append(kept)
            x = x + attended
            x = x + block.contract(block.expand(block.mlp_norm(x)))
        x = self.decoder.get_layer("last_norm")(x[:, -1:])
        return self.decoder.get_layer("logits")(x), ops.stack(caches, axis=1)


def _attention(layer: Any, x: Any, cache: Any, place: Any, seen: Any) -> tuple[Any, Any]:
    new = ops.stack([layer.key_dense(x), layer.value_dense(x)], axis=1)
    cache = ops.slice_update(cache, [0, 0, place, 0, 0], new)
    scores = ops.einsum("bthk,bshk->bhts", layer.query_dense(x), cache[:, 0])
    weights = ops.softmax(ops.where(seen, scores / layer.key_dim**0.5, -1e9))
    return layer.output_dense(ops.einsum("bhts,bshk->bthk", weights, cache[:, 1])), cache


def _likeliest(logits: Any) -> Any:
    return ops.cast(ops.argmax(logits, axis=-1), "int32")


@frozen(eq=False)
class Generation(Training):
    """Calls that each add `TOKENS` tokens to the prompts of a batch."""

    training: keras_training.KerasTraining
    given: int  # the tokens of a prompt
    continued: Callable[[Any], Any]  # returns prompts, and behind each the likeliest tokens

    def losses(self, steps: int) -> list[float]:
        """A number of each call that another token changes."""
        found = [ops.convert_to_numpy(self._tokens()).ravel() for _ in range(steps)]
        return [float(each @ np.arange(1, 1 + each.size)) for each in found]

    def epoch(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            ops.convert_to_numpy(self._tokens())
        return (time.perf_counter() - began) / steps

    def kept(self) -> Iterator[Any]:
        return self.training.kept()

    def share(self) -> int:
        return self.training.share()

    def _tokens(self) -> Any:
        return self.continued(self.training.case.data(1)[0][:, : self.given])


@frozen(eq=False)
class SumsAlone(Training):
    """The all-reduces that calls of a `Generation` start, one after another, and nothing else.

    Attributes:
        generation: The calls; their losses are those of this contender.
        count: The all-reduces of a call.
        shape: The shape of an operand.
    """

    generation: Generation
    count: int
    shape: tuple[int, ...]

    def losses(self, steps: int) -> list[float]:
        return self.generation.losses(steps)

    def epoch(self, steps: int) -> float:
        import torch

        operand = torch.ones(self.shape)
        began = time.perf_counter()
        for _ in range(steps * self.count):
            torch.distributed.all_reduce(operand)
        return (time.perf_counter() - began) / steps

    def kept(self) -> Iterator[Any]:
        return self.generation.kept()

    def share(self) -> int:
        return self.generation.share()
