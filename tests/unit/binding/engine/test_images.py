"""Images are convolved and pooled where they are, with the numbers of plain Keras."""

import keras
import pytest
import torch
from torch.profiler import profile

import shardcore

LAYERS = {
    "convolution": lambda: keras.layers.Conv2D(4, 3, activation="relu"),
    "padded convolution": lambda: keras.layers.Conv2D(4, 3, strides=2, padding="same"),
    "by channel": lambda: keras.layers.SeparableConv2D(4, 3),
    "transposed": lambda: keras.layers.Conv2DTranspose(4, 3, strides=2),
    "largest": lambda: keras.layers.MaxPooling2D(2),
    "largest of windows that overlap": lambda: keras.layers.MaxPooling2D(3, 2, padding="same"),
    "mean": lambda: keras.layers.AveragePooling2D(2),
    "mean of windows that overlap": lambda: keras.layers.AveragePooling2D(3, 2, padding="same"),
    "mean of all": keras.layers.GlobalAveragePooling2D,
}


def computed(build):
    """The result of a layer, and the gradient of its input."""
    keras.utils.set_random_seed(0)
    images = torch.randint(0, 3, (2, 6, 7, 3)).float().requires_grad_()  # equal ones, to choose
    y = build()(images)
    (gradient,) = torch.autograd.grad(y, images, torch.randn(y.shape))
    return y.detach(), gradient


@pytest.fixture
def installed():
    def within(run, *args):
        shardcore.install("single")
        try:
            return run(*args)
        finally:
            shardcore.uninstall()

    return within


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_numbers_of_plain_keras(name, installed):
    expected = computed(LAYERS[name])
    for one, other in zip(installed(computed, LAYERS[name]), expected, strict=True):
        assert torch.equal(one, other)


def test_no_image_is_copied(installed):
    def copies():
        images = torch.rand(2, 6, 7, 3)
        convolution = keras.layers.Conv2D(4, 3)
        convolution.build(images.shape)
        with profile(acc_events=True) as profiled:  # torch 2.11 warns without it
            keras.layers.MaxPooling2D()(convolution(images))
        named = {each.key: each for each in profiled.key_averages()}
        return named["aten::clone"].count

    of_kernel = 1  # whose memory has the channels first
    assert copies() >= of_kernel  # Keras 3.13 copies no image
    assert installed(copies) == of_kernel


def test_a_captured_model_with_pooling_gives_the_bits_of_eager_steps(installed):
    def losses(jit_compile):
        keras.utils.set_random_seed(1)
        layers = [
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(3, 2),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(4, 3),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
        ]
        model = keras.Sequential([keras.Input((20, 20, 3)), *layers, keras.layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=jit_compile)
        x = keras.random.normal((24, 20, 20, 3), seed=3)
        y = keras.ops.arange(24) % 5
        history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        return history.history["loss"], [each.tolist() for each in model.get_weights()]

    captured, eager = (installed(losses, jit) for jit in ("auto", False))
    assert captured == eager
