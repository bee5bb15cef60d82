"""A recommender: large tables of users and items, whose rows are sharded over the axis "model".

python examples/gallery/recommender.py
torchrun --nproc_per_node=2 examples/gallery/recommender.py
"""

import sys

import shardcore

shardcore.install()  # before Keras is imported
import keras
import numpy as np
from keras import distribution, layers

small = "--small" in sys.argv
USERS, ITEMS, TASTES, WIDTH = (500, 100, 4, 16) if small else (20_000, 5_000, 4, 32)
count, epochs, batch_size = (1024, 2, 512) if small else (1_000_000, 3, 2048)

keras.utils.set_random_seed(1)
mesh = distribution.DeviceMesh((1, distribution.get_device_count()), ("data", "model"))
rules = distribution.LayoutMap(mesh)
rules[".*_table/embeddings"] = ("model", None)  # a rank has some users, some items
distribution.set_distribution(distribution.ModelParallel(layout_map=rules, batch_dim_name="data"))

user, item = (keras.Input((), dtype="int32", name=name) for name in ("user", "item"))
tables = [
    layers.Embedding(USERS, WIDTH, name="user_table")(user),
    layers.Embedding(ITEMS, WIDTH, name="item_table")(item),
]
x = layers.Concatenate(name="both")([*tables, layers.Multiply(name="match")(tables)])
x = layers.Dense(64, activation="relu", name="hidden")(x)
model = keras.Model([user, item], layers.Dense(1, name="likes")(x), name="recommender")
model.compile(
    keras.optimizers.Adam(5e-3),
    keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)


def likes(count):
    """Users with hidden tastes meet items of hidden kinds: who likes which, with some noise."""
    random = np.random.default_rng(1)
    users, items = random.integers(0, USERS, count), random.integers(0, ITEMS, count)
    tastes, kinds = random.normal(size=(USERS, TASTES)), random.integers(0, TASTES, ITEMS)
    scores = tastes[users, kinds[items]] + random.normal(0, 0.3, count)
    return [users.astype("int32"), items.astype("int32")], (scores > 0).astype("float32")[:, None]


x, y = likes(count + count // 10)
tests, targets = [part[count:] for part in x], y[count:]
x, y = [part[:count] for part in x], y[:count]
history = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=2).history
model.evaluate(tests, targets, batch_size=batch_size, verbose=2)
