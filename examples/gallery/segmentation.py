"""Segmentation: a small U-Net gives each pixel a class; weights and optimizer states are sharded.

python examples/gallery/segmentation.py
torchrun --nproc_per_node=2 examples/gallery/segmentation.py
"""

import sys

import shardcore

shardcore.install()  # before Keras is imported
import keras
import numpy as np
from keras import distribution, layers

small = "--small" in sys.argv
count, epochs, batch_size = (16, 2, 8) if small else (512, 6, 16)
CLASSES, SIDE = 3, 32  # the ground, discs, squares


def images(count, seed):
    """Noisy images with a disc and two squares, which may hide others; and each pixel's class."""
    random = np.random.default_rng(seed)
    x = random.normal(0, 0.3, (count, SIDE, SIDE, 1))
    y = np.zeros((count, SIDE, SIDE), "int32")
    for kind in (2, 1, 2):
        centers = random.uniform(4, SIDE - 4, (2, count, 1, 1))
        down, across = abs(np.mgrid[:SIDE, :SIDE][:, None] - centers)
        distance = np.hypot(down, across) if kind == 1 else np.maximum(down, across)
        y[distance < random.uniform(4, 8, (count, 1, 1))] = kind
    return (x + (y > 0)[..., None]).astype("float32"), y


def convolve(x, width, name):
    x = layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"{name}_conv")(x)
    return layers.Activation("relu")(
        layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    )


def build():
    x = inputs = keras.Input((SIDE, SIDE, 1))
    levels = []
    for width in (16, 32):
        x = convolve(x, width, f"down_{width}")
        levels.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolve(x, 64, "middle")
    for width in (32, 16):
        x = layers.Concatenate()([layers.UpSampling2D()(x), levels.pop()])
        x = convolve(x, width, f"up_{width}")
    return keras.Model(inputs, layers.Conv2D(CLASSES, 1, name="classes")(x), name="unet")


keras.utils.set_random_seed(1)
mesh = distribution.DeviceMesh((distribution.get_device_count(),), ("data",))
# By default only what saves 64 KiB on each rank is sharded: this model is smaller.
shardcore.plan(build, mesh, policy="fully_sharded", small=4096).distribute()

model = build()
model.compile(
    keras.optimizers.Adam(2e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="mean_iou")],
)
x, y = images(count, seed=1)
history = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=2).history
model.evaluate(*images(count // 4, seed=2), batch_size=batch_size, verbose=2)
