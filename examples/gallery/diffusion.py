"""A diffusion model with its own train_step; all kernels are sharded over the batch axis.

python examples/gallery/diffusion.py
torchrun --nproc_per_node=2 examples/gallery/diffusion.py
"""

import sys
from itertools import pairwise

import shardcore

shardcore.install()  # before Keras is imported
import keras
import numpy as np
import torch
from keras import distribution, layers, ops

small = "--small" in sys.argv
count, epochs, batch_size, steps = (64, 2, 32, 4) if small else (8192, 6, 64, 20)
SIDE, WIDTH = 16, 384


def images(count):
    """Bright rings of any size and place on a dark ground, as rows of pixels."""
    random = np.random.default_rng(1)
    centers = random.uniform(5, SIDE - 5, (2, count, 1, 1))
    distance = np.hypot(*(np.mgrid[:SIDE, :SIDE][:, None] - centers))
    edge = 1.2 - abs(distance - random.uniform(3, 5, (count, 1, 1)))
    return np.tanh(2 * edge).astype("float32").reshape(count, SIDE * SIDE)


class Diffusion(keras.Model):
    def __init__(self, network):
        super().__init__(name="diffusion")
        self.network = network
        self.built = True  # the network is
        self.seeds = keras.random.SeedGenerator(1)
        self.mean = keras.metrics.Mean("loss")

    def train_step(self, data):
        images = keras.utils.unpack_x_y_sample_weight(data)[0]
        angle = keras.random.uniform((len(images), 1), 0, np.pi / 2, seed=self.seeds)
        noise = keras.random.normal(images.shape, seed=self.seeds)
        noisy = ops.cos(angle) * images + ops.sin(angle) * noise
        loss = ops.mean(ops.square(self.network([noisy, angle]) - noise))
        self.zero_grad()
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}

    def draw(self, count):  # each step takes a part of the predicted noise away
        x = np.random.default_rng(1).normal(size=(count, SIDE * SIDE))
        for angle, following in pairwise(np.linspace(0.98 * np.pi / 2, 0, steps + 1)):
            noise = self.network.predict_on_batch([x, np.full((count, 1), angle)])
            image = np.clip((x - np.sin(angle) * noise) / np.cos(angle), -1, 1)
            x = np.cos(following) * image + np.sin(following) * noise
        return x


keras.utils.set_random_seed(1)
mesh = distribution.DeviceMesh((distribution.get_device_count(),), ("data",))
rules = distribution.LayoutMap(mesh)
rules[".*/kernel"] = (None, "data")  # all-gathered where it is used: the batch has this axis too
distribution.set_distribution(distribution.ModelParallel(layout_map=rules, batch_dim_name="data"))

noisy, angle = inputs = keras.Input((SIDE * SIDE,)), keras.Input((1,))
x = layers.Concatenate()([noisy, ops.cos(angle), ops.sin(angle)])
x = layers.Dense(WIDTH, activation="swish", name="first")(x)
for number in range(2):
    x = x + layers.Dense(WIDTH, "swish", name=f"block_{number}")(layers.LayerNormalization()(x))
model = Diffusion(keras.Model(inputs, layers.Dense(SIDE * SIDE, name="noise")(x), name="network"))
model.compile(keras.optimizers.Adam(1e-3))
x = images(count)
history = model.fit(x, batch_size=batch_size, epochs=epochs, verbose=2).history
drawn = model.draw(64)
print(f"bright pixels: {(drawn > 0).mean():.3f}, of real images {(x > 0).mean():.3f}")
