"""A GAN with its own train_step: two networks, two optimizers; data parallel.

python examples/gallery/gan.py
torchrun --nproc_per_node=2 examples/gallery/gan.py
"""

import sys

import shardcore

shardcore.install()  # before Keras is imported
import keras
import numpy as np
import torch
from keras import distribution, layers, ops

small = "--small" in sys.argv
count, epochs, batch_size = (64, 2, 32) if small else (4096, 16, 64)
SIDE, NOISE = 16, 32


def images(count, seed):
    """Bright discs of any size and place on a dark ground, as rows of pixels."""
    random = np.random.default_rng(seed)
    centers = random.uniform(5, SIDE - 5, (2, count, 1, 1))
    down, across = np.mgrid[:SIDE, :SIDE][:, None] - centers
    edge = random.uniform(2, 5, (count, 1, 1)) - np.hypot(down, across)
    return np.tanh(2 * edge).astype("float32").reshape(count, SIDE * SIDE)


class GAN(keras.Model):
    def __init__(self, generator, discriminator):
        super().__init__(name="gan")
        self.generator, self.discriminator = generator, discriminator
        self.built = True  # both are
        self.seeds = keras.random.SeedGenerator(1)
        self.bce = keras.losses.BinaryCrossentropy(from_logits=True)
        self.means = [
            keras.metrics.Mean(name) for name in ("generator", "discriminator", "distance")
        ]

    def compile(self, g_optimizer, d_optimizer):
        super().compile()
        self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer

    def train_step(self, data):
        real = keras.utils.unpack_x_y_sample_weight(data)[0]
        fake = self.generator(keras.random.normal((len(real), NOISE), seed=self.seeds))
        on_real, on_fake = self.discriminator(real), self.discriminator(fake.detach())
        loss = self.bce(ops.ones_like(on_real), on_real)
        loss += self.bce(ops.zeros_like(on_fake), on_fake)
        self.update(self.discriminator, self.d_optimizer, loss)
        generator_loss = self.bce(ops.ones_like(on_real), self.discriminator(fake))
        self.update(self.generator, self.g_optimizer, generator_loss)
        distance = ops.mean(ops.abs(ops.mean(real, axis=0) - ops.mean(fake, axis=0)))
        for mean, value in zip(self.means, (generator_loss, loss, distance), strict=True):
            mean.update_state(value)
        return {mean.name: mean.result() for mean in self.means}

    def update(self, network, optimizer, loss):
        self.zero_grad()
        loss.backward()
        weights = network.trainable_weights
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)


keras.utils.set_random_seed(1)
distribution.set_distribution(distribution.DataParallel())  # each rank has all weights, some rows

generator = [keras.Input((NOISE,)), layers.Dense(256, "relu"), layers.Dense(SIDE * SIDE, "tanh")]
discriminator = [keras.Input((SIDE * SIDE,)), layers.Dense(256, "leaky_relu"), layers.Dense(1)]
model = GAN(
    keras.Sequential(generator, name="generator"),
    keras.Sequential(discriminator, name="discriminator"),
)
model.compile(keras.optimizers.Adam(5e-4, 0.5), keras.optimizers.Adam(5e-4, 0.5))
x = images(count, seed=1)
history = model.fit(x, batch_size=batch_size, epochs=epochs, verbose=2).history
