"""An image classifier whose first layers augment its images; data parallel.

python examples/gallery/images.py
torchrun --nproc_per_node=2 examples/gallery/images.py
"""

import sys

import shardcore

shardcore.install()  # before Keras is imported
import keras
import numpy as np
from keras import distribution, layers

small = "--small" in sys.argv
count, epochs, batch_size = (64, 2, 32) if small else (2048, 5, 64)
KINDS, SIDE = 4, 32


def images(count, seed):
    """Noisy discs, squares, rings and crosses of any size, place and colour; and their kinds."""
    random = np.random.default_rng(seed)
    y = random.integers(0, KINDS, count)
    centers = random.uniform(10, 22, (2, count, 1, 1))
    radius = random.uniform(5, 9, (count, 1, 1))
    down, across = abs(np.mgrid[:SIDE, :SIDE][:, None] - centers)
    distance = np.hypot(down, across)
    drawn = [
        distance < radius,
        np.maximum(down, across) < 0.9 * radius,
        abs(distance - radius) < 2,
        (np.maximum(down, across) < radius) & (np.minimum(down, across) < 2),
    ]
    inside = np.choose(y[:, None, None], drawn)[..., None]
    dark, bright = random.uniform(0, 0.5, (2, count, 1, 1, 3))
    x = np.where(inside, bright + 0.4, dark) + random.normal(0, 0.1, (count, SIDE, SIDE, 3))
    return x.clip(0, 1).astype("float32"), y


keras.utils.set_random_seed(1)
distribution.set_distribution(distribution.DataParallel())  # each rank has all weights, some rows

model = keras.Sequential(
    [
        keras.Input((SIDE, SIDE, 3)),
        layers.RandomFlip(name="flip"),
        layers.RandomBrightness(0.2, value_range=(0, 1), name="brightness"),
        layers.RandomContrast(0.3, value_range=(0, 1), name="contrast"),
        layers.Conv2D(16, 3, activation="relu", name="conv_1"),
        layers.BatchNormalization(momentum=0.9, name="norm_1"),
        layers.MaxPooling2D(name="pool_1"),
        layers.Conv2D(32, 3, activation="relu", name="conv_2"),
        layers.BatchNormalization(momentum=0.9, name="norm_2"),
        layers.MaxPooling2D(name="pool_2"),
        layers.Conv2D(64, 3, activation="relu", name="conv_3"),
        layers.GlobalAveragePooling2D(name="average"),
        layers.Dropout(0.2, name="drop"),
        layers.Dense(KINDS, name="kind"),
    ],
    name="images",
)
model.compile(
    keras.optimizers.Adam(2e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
x, y = images(count, seed=1)
history = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=2).history
model.evaluate(*images(count // 4, seed=2), batch_size=batch_size, verbose=2)
