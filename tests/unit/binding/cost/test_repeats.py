"""The layers of a model that repeat, so that a trace of some shows all."""

import keras
import pytest
from keras import layers

from shardcore.binding.cost.facts import runs_of


class Block(layers.Layer):
    """A hidden layer with a short cut, and settings that its configuration does not have."""

    def __init__(self, width=4, scale=1.0, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(width, name="hidden")
        self.scale = scale
        self.apply = lambda x: scale * x

    def call(self, x, other=None):
        return x + self.apply(self.hidden(x)) + (0 if other is None else other)


def model_of(blocks, final=None):
    x = h = keras.Input((4,))
    for block in blocks:
        h = block(h)
    return keras.Model(x, h if final is None else final(x, h))


def numbered(count, **options):
    return [Block(name=f"block_{number}", **options) for number in range(count)]


def test_equal_blocks_in_a_row_repeat():
    names = tuple(f"block_{number}" for number in range(3))
    assert runs_of(model_of([layers.Dense(4), *numbered(3), layers.Dense(4)])) == (names,)
    assert runs_of(keras.Sequential([keras.Input((4,)), *numbered(3)])._functional) == (names,)


@pytest.mark.parametrize("odd", [{"scale": 2.0}, {"dtype": "bfloat16"}, {"trainable": False}])
def test_a_block_with_other_settings_does_not_repeat(odd):
    blocks = [*numbered(2), Block(name="odd", **odd), Block(name="last")]
    assert runs_of(model_of(blocks)) == (("block_0", "block_1"),)


def test_blocks_of_two_runs_and_an_argument_that_all_get():
    x = memory = keras.Input((4,))
    for block in numbered(2):
        memory = block(memory)
    h = layers.Dense(4, name="between")(x)
    for number in range(3):
        h = Block(name=f"decoder_{number}")(h, other=memory)
    found = runs_of(keras.Model(x, h))
    expected = {("block_0", "block_1"), ("decoder_0", "decoder_1", "decoder_2")}
    assert set(found) == expected


def test_outputs_that_others_use_end_a_run():
    first, second, third = numbered(3)
    x = keras.Input((4,))
    a = first(x)
    b = second(a)
    c = third(b)
    assert runs_of(keras.Model(x, [a, c])) == (("block_1", "block_2"),)
    assert runs_of(keras.Model(x, c + b)) == (("block_0", "block_1"),)
    assert runs_of(keras.Model(x, third(c))) == (("block_0", "block_1"),)


def test_layers_of_other_sizes_do_not_repeat():
    image = h = keras.Input((8, 8, 3))
    for number in range(3):
        h = layers.Conv2D(4 * 2**number, 3, padding="same")(h)
    assert runs_of(keras.Model(image, h)) == ()


def test_a_shared_layer_is_no_block():
    shared = Block(name="shared")
    assert runs_of(model_of([shared, shared, shared])) == ()
