"""A text classifier: which module of Python do these words come from? Words are sharded too.

python examples/gallery/text_classifier.py
torchrun --nproc_per_node=2 examples/gallery/text_classifier.py
"""

import importlib
import inspect
import re
import sys
import zlib

import shardcore

shardcore.install()  # before Keras is imported
import keras
import numpy as np
from keras import distribution, layers

small = "--small" in sys.argv
count, epochs, batch_size = (32, 2, 16) if small else (4096, 4, 64)
MODULES = "_pydecimal argparse doctest inspect pickle subprocess tarfile typing".split()
WORDS, LENGTH, WIDTH = 4096, 24, 128


def passages():
    """Shuffled passages of words of the modules' sources, each word a number; and the module's."""
    x, y = [], []
    for label, name in enumerate(MODULES):
        words = re.findall(r"[A-Za-z]+", inspect.getsource(importlib.import_module(name)))
        numbers = [zlib.crc32(word.encode()) % WORDS for word in words]
        windows = [numbers[at : at + LENGTH] for at in range(0, len(numbers) - LENGTH, LENGTH)]
        x, y = x + windows, y + [label] * len(windows)
    order = np.random.default_rng(1).permutation(len(x))
    return np.array(x, "int32")[order], np.array(y, "int32")[order]


def build():
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(words)
    h = layers.LayerNormalization(name="attention_norm")(x)
    x = x + layers.MultiHeadAttention(4, WIDTH // 4, name="attention")(h, h)
    h = layers.LayerNormalization(name="hidden_norm")(x)
    h = layers.Dense(4 * WIDTH, activation="gelu", name="expand")(h)
    x = x + layers.Dense(WIDTH, name="contract")(h)
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(words, layers.Dense(len(MODULES), name="module")(x), name="classifier")


keras.utils.set_random_seed(1)
mesh = distribution.DeviceMesh((1, distribution.get_device_count()), ("data", "model"))
plan = shardcore.plan(build, mesh, policy="sequence_parallel")
plan.distribute()  # print(plan) shows its rules and their reasons

model = build()
model.compile(
    keras.optimizers.Adam(5e-4),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
x, y = passages()
tests = x[count:][: count // 4], y[count:][: count // 4]
x, y = x[:count], y[:count]
history = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=2).history
model.evaluate(*tests, batch_size=batch_size, verbose=2)
