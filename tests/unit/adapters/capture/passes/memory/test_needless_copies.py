"""A captured step without needless copies of images gives the results of the eager step."""

import keras
import pytest
import torch

from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.passes import improved
from shardcore.adapters.capture.passes.cleanup import with_direct_views
from shardcore.adapters.capture.passes.memory.kept_buckets import Memories
from shardcore.adapters.capture.passes.memory.reuse import without_needless_copies
from shardcore.adapters.capture.recorder import Recorder
from tests import tapes
from tests.tapes import unshared_views

FIRST = {"memory_format": torch.contiguous_format}
LAST = {"memory_format": torch.channels_last}


def after(step, *tensors):
    """The operators that remain of `step`; its results and their strides are the same."""
    recorder = Recorder(tensors)
    recorder.run(lambda: step(*tensors))
    tape = without_needless_copies(with_direct_views(recorder.tape))
    runs = [
        function_of(each, {n: each.found[n] for n in each.outside})
        for each in (recorder.tape, tape)
    ]
    copies = [[each.clone() for each in tensors] for _ in runs]
    for one, other in zip(*(run(*own) for run, own in zip(runs, copies, strict=True)), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert unshared_views(tape) == []
    return [call.operator.__name__.partition(".")[0] for call in tape.calls]


def images(channels=3):
    """Of few different values: there are equal ones to choose from."""
    return torch.randint(0, 3, (2, 6, 7, channels)).float()


def pooled(x, window=2, strides=2, padding=0):
    """As Keras has it: channels last, copied to have them first."""
    copied = x.permute(0, 3, 1, 2).clone(**FIRST)
    args = ([window, window], [strides, strides], [padding, padding])
    return copied, *torch.ops.aten.max_pool2d_with_indices(copied, *args)


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
def test_an_image_is_pooled_without_a_copy(window):
    found = after(lambda x: pooled(x, *window)[1], images())
    assert found == ["permute", "max_pool2d_with_indices", "clone"]


def test_a_result_that_is_copied_back_is_not_copied_at_all():
    found = after(lambda x: pooled(x)[1].clone(**LAST) + 1, images())
    assert found == ["permute", "max_pool2d_with_indices", "add"]


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
def test_a_gradient_has_the_strides_of_the_image(window):
    size, strides, padding = window

    def step(x, gradient, activation):
        copied, _, indices = pooled(x, *window)
        back = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient.permute(0, 3, 1, 2),
            copied,
            *([size, size], [strides, strides], [padding, padding], [1, 1], False, indices),
        )
        return torch.ops.aten.threshold_backward(back.permute(0, 2, 3, 1), activation, 0)

    x = images()
    shape = pooled(x, *window)[1].permute(0, 2, 3, 1).shape
    found = after(step, x, torch.randn(shape), torch.randn(x.shape))
    assert "clone" not in found


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
@pytest.mark.parametrize("with_padding", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_average_and_its_gradient_have_the_strides_of_the_image(window, with_padding, dtype):
    size, strides, padding = window
    how = ([size, size], [strides, strides], [padding, padding], False, with_padding, None)

    def step(x, gradient, activation):
        copied = x.permute(0, 3, 1, 2).clone(**FIRST)
        mean = torch.ops.aten.avg_pool2d(copied, *how)
        back = torch.ops.aten.avg_pool2d_backward(gradient.permute(0, 3, 1, 2), copied, *how)
        taken = torch.ops.aten.threshold_backward(back.permute(0, 2, 3, 1), activation, 0)
        return mean.clone(**LAST) + 1, taken

    x = torch.randn(2, 6, 7, 19, dtype=dtype)
    shape = torch.ops.aten.avg_pool2d(x.permute(0, 3, 1, 2), *how).permute(0, 2, 3, 1).shape
    found = after(step, x, *(torch.randn(each, dtype=dtype) for each in (shape, x.shape)))
    assert "clone" not in found


def test_a_tensor_that_is_written_into_is_copied():
    def step(x):
        copied = x.permute(0, 3, 1, 2).clone(**FIRST)
        x.mul_(-1)
        return torch.ops.aten.max_pool2d_with_indices(copied, [2, 2])

    assert "clone" in after(step, images())
    assert "clone" in after(lambda x: pooled(x)[0].add_(1), images())


def test_a_tensor_that_is_returned_is_copied():
    assert after(lambda x: x.clone(), images()) == ["clone"]


def test_operands_of_different_strides_are_copied():
    def step(x, y):
        return x.permute(0, 3, 1, 2).clone(**FIRST) + y.permute(0, 3, 2, 1).clone(**FIRST)

    assert after(step, images(), images().transpose(1, 2)).count("clone") == 2


def test_a_view_of_a_copy_that_is_not_made_keeps_the_original():
    """A later result may not be written into the memory of the original."""

    def step(x):
        original = x * 2
        row = original.clone().view(-1)
        return original + 1, row * 3

    tape = tapes.after(step, lambda tape: improved(tape, Memories()), images())
    assert "clone" not in tapes.names(tape)


def test_an_image_of_one_channel_is_pooled_without_a_copy():
    assert after(lambda x: pooled(x)[1] + 1, images(1))[-2:] == ["max_pool2d_with_indices", "add"]


def test_a_keras_model_with_pooling_gives_the_bits_of_eager_steps():
    def losses(jit_compile):
        keras.utils.set_random_seed(1)
        conv, pool, norm = (
            keras.layers.Conv2D,
            keras.layers.MaxPooling2D,
            keras.layers.BatchNormalization,
        )
        layers = [
            conv(8, 3, activation="relu"),
            pool(3, 2),
            norm(),
            conv(4, 3),
            pool(),
            keras.layers.Flatten(),
        ]
        model = keras.Sequential([keras.Input((20, 20, 3)), *layers, keras.layers.Dense(5)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=jit_compile)
        x = keras.random.normal((24, 20, 20, 3), seed=3)
        y = keras.ops.arange(24) % 5
        history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        return history.history["loss"], [each.tolist() for each in model.get_weights()]

    import shardcore

    shardcore.install("single")
    try:
        assert losses("auto") == losses(False)
    finally:
        shardcore.uninstall()


def test_a_tensor_that_is_transposed_in_place_keeps_its_new_strides():
    class Turns(keras.layers.Layer):
        def call(self, x):
            turned = x * 2
            turned.transpose_(1, 2)
            return turned.transpose(1, 2) * keras.ops.arange(5.0)

    import shardcore

    shardcore.install("single")
    try:
        model = keras.Sequential([keras.Input((3, 5)), Turns(), keras.layers.Dense(2)])
        x = torch.randn(4, 3, 5)
        model.compile("sgd", "mse", jit_compile=False)
        expected = model.predict_on_batch(x)
        model.compile("sgd", "mse")
        for _ in range(4):
            assert model.predict_on_batch(x).tolist() == expected.tolist()
    finally:
        shardcore.uninstall()
