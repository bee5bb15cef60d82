"""A decoder that generates by `ops.while_loop`, as models of keras-hub do."""

import keras
import numpy as np
import torch
from keras import layers, ops

import shardcore
from shardcore.binding import keras_private
from tests.distributed.programs import distribute

MESHES = ((1, 2), (2, 1))
RULES = {
    "decoder/kv/kernel": (None, None, "model", None),
    "decoder/query/kernel": (None, "model", None),
    "decoder/out/kernel": ("model", None, None),
}
PROMPT = np.array([[1, 2, 3, 0, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0, 0, 0]], "int32")
LENGTH = PROMPT.shape[1]


class Decoder(keras.Model):
    """One block of attention with a cache of keys and values, and a loop over tokens."""

    def __init__(self):
        super().__init__(name="decoder")
        self.embed = layers.Embedding(16, 8, "random_normal", name="embed")
        self.query = layers.EinsumDense("btd,dhk->bthk", (None, 2, 4), name="query")
        self.kv = layers.EinsumDense("btd,dshk->bsthk", (2, None, 2, 4), name="kv")
        self.out = layers.EinsumDense("bthk,hkd->btd", (None, 8), name="out")
        self.scale = 1.0

    def call(self, tokens):
        return self._build_cache(tokens)[0]

    def _build_cache(self, tokens):
        """Fills a cache with prompts; named as in keras-hub."""
        return self.with_cache(tokens, ops.zeros((len(tokens), 2, LENGTH, 2, 4)), 0)

    def with_cache(self, tokens, cache, place):
        x = self.embed(tokens)
        cache = ops.slice_update(cache, [0, 0, place, 0, 0], self.kv(x))
        seen = ops.arange(LENGTH)[None] <= place + ops.arange(tokens.shape[1])[:, None]
        scores = ops.einsum("bthk,bshk->bhts", self.query(x), cache[:, 0]) * self.scale
        scores = ops.softmax(ops.where(seen, scores, -1e9))
        x = self.out(ops.einsum("bhts,bshk->bthk", scores, cache[:, 1]))
        return ops.matmul(x, ops.transpose(self.embed.embeddings)), cache

    def generate(self, prompt, bias=0.0, stop=None):
        """Writes the likeliest token into each free place, until `stop` is in every row."""
        with torch.no_grad():
            prompt = shardcore.ensure_dtensor_input(prompt) if distributed() else prompt
            prompt = ops.convert_to_tensor(prompt)
            given, bias = prompt > 0, ops.convert_to_tensor(bias)
            _, cache = self._build_cache(prompt)
            first = ops.min(ops.sum(ops.cast(given, "int32"), axis=1))

            def goes_on(tokens, cache, place):
                if stop is None:
                    return True
                return ops.logical_not(ops.all(ops.any((tokens == stop) & ~given, axis=1)))

            def add_token(tokens, cache, place):
                last = ops.slice(tokens, [0, place - 1], [len(tokens), 1])
                logits, cache = self.with_cache(last, cache, place - 1)
                found = ops.cast(ops.argmax(logits[:, 0] + bias, axis=-1), tokens.dtype)
                found = ops.where(given[:, place], tokens[:, place], found)
                tokens = ops.slice_update(tokens, [0, place], found[:, None])
                return tokens, cache, place + 1

            return ops.while_loop(goes_on, add_token, (prompt, cache, first), LENGTH - first)


def distributed():
    return keras.distribution.distribution() is not None


def decoder(shape, **options):
    if shape is not None:
        distribute(shape, RULES, **options)
    keras.utils.set_random_seed(3)
    model = Decoder()
    model.compile("sgd", "mse")
    model(PROMPT)
    return model


def states(model):
    """The steps of the model's loops: their states, and how often their programs ran."""
    steps = vars(model).get(keras_private.LOOP_STEPS, {}).values()
    found = [entry.progress for step in steps for entry in step._entries.values()]
    return [(each.state, each.runs) for each in found]
