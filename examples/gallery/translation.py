"""Translation: an encoder and a decoder turn digits into words; tensor parallel by a policy.

python examples/gallery/translation.py
torchrun --nproc_per_node=2 examples/gallery/translation.py
"""

import sys

import shardcore

shardcore.install()  # before Keras is imported
import keras
import numpy as np
from keras import distribution, layers

small = "--small" in sys.argv
count, epochs, batch_size = (32, 2, 16) if small else (8192, 4, 64)
ONES = "zero one two three four five six seven eight nine ten eleven twelve".split()
ONES += [f"{word}teen" for word in "thir four fif six seven eigh nine".split()]
TENS = [f"{word}ty" for word in "twen thir for fif six seven eigh nine".split()]
WORDS = ["", "<", ">", *ONES, *TENS, "hundred", "thousand"]  # padding, begin, end
DIGITS, LENGTH, WIDTH = 6, 10, 64


def english(n):
    """The words of a number below a million."""
    if n < 100:
        return [ONES[n]] if n < 20 else [TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])]
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return [*english(n // unit), name, *(english(n % unit) if n % unit else [])]


def sentences(numbers):
    """The digits of numbers, and their words between two marks, padded."""
    digits = [[int(digit) for digit in f"{n:0{DIGITS}}"] for n in numbers]
    words = [("<", *english(n), ">", *[""] * LENGTH)[: LENGTH + 1] for n in numbers]
    return np.array(digits), np.array([[WORDS.index(word) for word in row] for row in words])


def attend(x, name, to=None, **options):
    h = layers.LayerNormalization(name=f"{name}_norm")(x)
    attention = layers.MultiHeadAttention(4, WIDTH // 4, name=name)
    return x + attention(h, h if to is None else to, **options)


def build():
    inputs = [keras.Input((DIGITS,), name="digits"), keras.Input((LENGTH,), name="words")]
    sides = []
    for side, tokens in zip(("encoder", "decoder"), inputs, strict=True):
        positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
        x = layers.Embedding(len(WORDS), WIDTH, name=f"{side}_tokens")(tokens)
        x = x + layers.Embedding(LENGTH, WIDTH, name=f"{side}_positions")(positions)
        x = attend(x, f"{side}_attention", use_causal_mask=side == "decoder")
        x = attend(x, "cross_attention", sides[0]) if sides else x
        h = layers.LayerNormalization(name=f"{side}_hidden_norm")(x)
        h = layers.Dense(4 * WIDTH, activation="gelu", name=f"{side}_expand")(h)
        sides.append(x + layers.Dense(WIDTH, name=f"{side}_contract")(h))
    return keras.Model(inputs, layers.Dense(len(WORDS), name="next")(sides[1]), name="translator")


keras.utils.set_random_seed(1)
mesh = distribution.DeviceMesh((1, distribution.get_device_count()), ("data", "model"))
shardcore.plan(build, mesh, policy="tensor_parallel", small=0).distribute()  # a tiny model

model = build()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, weighted_metrics=["accuracy"])
numbers = np.random.default_rng(1).permutation(10**DIGITS)
digits, words = sentences(numbers[: count + count // 32])
x, y = [digits[:count], words[:count, :-1]], words[:count, 1:]
history = model.fit(x, y, batch_size, epochs, verbose=2, sample_weight=y > 0).history

# Translate numbers that it has not seen: each time the most likely word joins the sentence.
digits, words = digits[count:], words[count:, :-1]
written = np.full_like(words, WORDS.index("<"))
for at in range(1, 2 if small else LENGTH):
    written[:, at] = model.predict_on_batch([digits, written])[:, at - 1].argmax(-1)
print(*digits[0], "is", " ".join(WORDS[word] for word in written[0, 1:]).split(" >")[0])
print(f"right sentences: {((written == words) | (words == 0)).all(axis=1).mean():.0%}")
