"""A language model of the documentation that Python ships with; a layout map written by hand.

python examples/gallery/language_model.py
torchrun --nproc_per_node=2 examples/gallery/language_model.py
"""

import sys
from pydoc_data.topics import topics

import shardcore

shardcore.install()  # before Keras is imported
import keras
import numpy as np
from keras import distribution, layers

small = "--small" in sys.argv
count, epochs, batch_size = (16, 2, 8) if small else (2048, 4, 32)
BYTES, LENGTH, WIDTH, HEADS, BLOCKS = 128, 64, 128, 4, 2

keras.utils.set_random_seed(1)
mesh = distribution.DeviceMesh((1, distribution.get_device_count()), ("data", "model"))
rules = distribution.LayoutMap(mesh)
# As in Megatron: a rank has some of the heads and of the hidden units, and sums are reduced.
rules[".*(query|key|value)/kernel"] = (None, "model", None)
rules[".*(query|key|value)/bias"] = ("model", None)
rules[".*attention_output/kernel"] = ("model", None, None)
rules[".*expand/kernel"] = (None, "model")
rules[".*expand/bias"] = ("model",)
rules[".*contract/kernel"] = ("model", None)
distribution.set_distribution(distribution.ModelParallel(layout_map=rules, batch_dim_name="data"))


def build():
    tokens = keras.Input((LENGTH,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(BYTES, WIDTH, name="tokens")(tokens)
    x = x + layers.Embedding(LENGTH, WIDTH, name="positions")(positions)
    for n in range(BLOCKS):
        h = layers.LayerNormalization(name=f"attention_norm_{n}")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{n}")
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization(name=f"hidden_norm_{n}")(x)
        h = layers.Dense(4 * WIDTH, activation="gelu", name=f"block_{n}_expand")(h)
        x = x + layers.Dense(WIDTH, name=f"block_{n}_contract")(h)
    x = layers.LayerNormalization(name="last_norm")(x)
    return keras.Model(tokens, layers.Dense(BYTES, name="next")(x), name="decoder")


def write(model, text, letters):
    """Continues `text`, each time by the byte that the model finds most likely."""
    for _ in range(letters):
        known = text.encode()[-LENGTH:]
        window = np.frombuffer(known.ljust(LENGTH), np.uint8)[None].astype("int32")
        scores = model.predict_on_batch(window)[0, len(known) - 1]
        text += chr(scores.argmax())
    return text


model = build()
model.compile(
    keras.optimizers.Adam(2e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
data = np.frombuffer(text, np.uint8).astype("int32")
windows = np.random.default_rng(1).permutation(len(data) // LENGTH - 1)[:, None] * LENGTH
x, tests = np.split(data[windows + np.arange(LENGTH)], [count])
y, targets = np.split(data[windows + np.arange(LENGTH) + 1], [count])
history = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=2).history
model.evaluate(tests[: count // 4], targets[: count // 4], batch_size=batch_size, verbose=2)
print(write(model, "A class definition ", 1 if small else 60))
