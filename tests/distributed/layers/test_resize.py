"""A resized vocabulary: old rows stay, and training goes on as on one device."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.capture import State
from shardcore.testing import run_ranks
from tests.distributed.programs import STRATEGY, distribute, local_shapes

WORDS, WIDTH, ROWS, LENGTH = 10, 6, 8, 5
RNG = np.random.default_rng(0)
NEW = keras.initializers.Constant(0.125)
SHARDED = {
    "words/embeddings": ("model", None),
    "words/reverse_embeddings": (None, "model"),
    "head/kernel": (None, "model"),
    "head/bias": ("model",),
}
BY_ROWS = {"words/embeddings": ("data", None), "head/kernel": ("data", None)}


def data(words):
    return RNG.integers(0, words, (ROWS, LENGTH)), RNG.integers(0, words, (ROWS, LENGTH))


BEFORE, AFTER = data(7), {size: data(size) for size in (7, 13)}


def with_head(words):
    x = keras.Input((LENGTH,), dtype="int32")
    h = keras.layers.Embedding(words, WIDTH, name="words")(x)
    return keras.Model(x, keras.layers.Dense(words, name="head")(h))


def tied(words, tie=True):
    x = keras.Input((LENGTH,), dtype="int32")
    layer = keras.layers.ReversibleEmbedding(words, WIDTH, tie_weights=tie, name="words")
    return keras.Model(x, layer(keras.ops.tanh(layer(x)), reverse=True))


def untied(words):
    return tied(words, tie=False)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "averaged": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=4
    ),
}


def compiled(build, words, optimizer="adam"):
    keras.utils.set_random_seed(4)
    model = build(words)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss)
    return model


def fit(model, x, y, epochs=8):
    return model.fit(x, y, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def state(model):
    """The values of all variables of a model and its optimizer."""
    return [np.array(variable) for variable in [*model.weights, *model.optimizer.variables]]


def resized(value, shape, new_value):
    """Copies an array into one of another size, by NumPy."""
    new = np.full(shape, new_value, value.dtype)
    kept = kept_part(value, new)
    new[kept] = value[kept]
    return new


def kept_part(old, new):
    return tuple(slice(min(sizes)) for sizes in zip(old.shape, new.shape, strict=True))


def new_value(variable, weights):
    """The value of new rows: of matrices and their averages the drawn one, of all others 0."""
    is_drawn = any(variable is w for w in weights) or variable.name.endswith("_average")
    return 0.125 if is_drawn and len(variable.shape) == 2 else 0.0


def by_copying(build, optimizer, size):
    """Returns what one device trains if arrays are copied into a larger or smaller model."""
    shardcore.uninstall()
    old, new = (compiled(build, words, optimizer) for words in (WORDS, size))
    losses = fit(old, *BEFORE)
    new.optimizer.build(new.trainable_variables)
    variables = [*new.weights, *new.optimizer.variables]
    for variable, value in zip(variables, state(old), strict=True):
        variable.assign(resized(value, variable.shape, new_value(variable, new.weights)))
    return losses + fit(new, *AFTER[size]), state(new)


def resize_all(model, size):
    for layer in model.layers:
        if isinstance(layer, keras.layers.Embedding | keras.layers.Dense):
            shardcore.resize(layer, size, NEW, model=model)


CASES = [
    (with_head, (1, 2), SHARDED, 13, "adam"),
    (with_head, (1, 2), SHARDED, 7, "adam"),
    (with_head, (2, 1), {}, 13, "averaged"),
    (with_head, (2, 1), BY_ROWS, 7, "averaged"),
    (tied, (1, 2), SHARDED, 13, "adam"),
    (untied, (1, 2), SHARDED, 13, "averaged"),
    (untied, None, {}, 13, "adam"),
]


@pytest.mark.parametrize(("build", "shape", "rules", "size", "optimizer"), CASES)
def test_training_goes_on_as_on_one_device(tmp_path, build, shape, rules, size, optimizer):
    def program(rank):
        if shape is None:
            shardcore.install("single")
        else:
            distribute(shape, rules, strategy=STRATEGY)
        model = compiled(build, WORDS, optimizer)
        losses = fit(model, *BEFORE)
        before = state(model)
        resize_all(model, size)
        after = state(model)
        losses += fit(model, *AFTER[size])
        states = {e.progress.state for e in model.train_function.captured._entries.values()}
        model.save(tmp_path / "model.keras")
        shapes = local_shapes(model.weights) if shape else {}
        return (
            losses,
            before,
            after,
            state(model),
            states,
            shapes,
            model.predict(AFTER[size][0], verbose=0),
        )

    def reference(rank):
        losses, values = by_copying(build, optimizer, size)
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        sizes = [w.shape for w in loaded.weights]
        return losses, values, loaded.predict(AFTER[size][0], verbose=0), sizes

    results = run_ranks(program, 1 if shape is None else 2)
    ((losses, values, predictions, sizes),) = run_ranks(reference, 1)
    assert all(size in of_variable for of_variable in sizes)
    for own_losses, before, after, own_values, states, shapes, own_predictions in results:
        for old, new in zip(before, after, strict=True):
            kept = kept_part(old, new)
            np.testing.assert_array_equal(new[kept], old[kept])
        np.testing.assert_allclose(own_losses, losses, rtol=1e-4)
        for own, value in zip(own_values, values, strict=True):
            np.testing.assert_allclose(own, value, atol=2e-5)
        assert State.CAPTURED in states
        np.testing.assert_allclose(own_predictions, predictions, atol=1e-5)
        if rules is SHARDED:
            (of_words,) = (s for path, s in shapes.items() if path.endswith("words/embeddings"))
            assert of_words[0] < size  # it is still sharded


def test_all_ranks_take_the_rows_of_rank_0_which_are_new():
    def program(rank):
        distribute((1, 2), SHARDED)
        keras.utils.set_random_seed(4)
        model = with_head(WORDS)
        before = np.array(model.layers[1].embeddings)
        shardcore.resize(model.layers[1], 20, keras.initializers.RandomNormal(seed=rank))
        named = np.array(model.layers[1].embeddings)
        shardcore.resize(model.layers[1], 30)  # by the initializer of the layer
        drawn = keras.initializers.RandomNormal(seed=0)((20, WIDTH))[WORDS:]
        np.testing.assert_array_equal(named[WORDS:], np.array(drawn))
        return before, named, np.array(model.layers[1].embeddings)

    results = run_ranks(program, 2)
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)
    before, _, after = results[0]
    old_and_new = np.concatenate([before, after[20:]])
    assert len(np.unique(old_and_new)) == old_and_new.size  # no number is drawn twice


def quantized():
    layer = keras.layers.Dense(4)
    layer.build((None, 8))
    layer.quantize("int8")
    return layer


def with_lora():
    layer = keras.layers.Embedding(4, 8)
    layer.build()
    layer.enable_lora(2)
    return layer


WRONG = {
    "unbuilt": (lambda: keras.layers.Embedding(4, 8), 5, "is not built"),
    "quantized": (quantized, 5, "is quantized"),
    "LoRA": (with_lora, 5, "is LoRA-enabled"),
    "other": (lambda: keras.layers.Dropout(0.1), 5, "a layer with a vocabulary"),
    "empty": (with_lora, 0, "number of tokens"),
    "bool": (with_lora, True, "number of tokens"),
    "text": (with_lora, "5", "number of tokens"),
}


@pytest.fixture
def _single():
    """Installs shardcore in this process, and not in ranks that are forked from it later."""
    shardcore.install("single")
    yield
    shardcore.uninstall()


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.usefixtures("_single")
def test_a_wrong_use_is_an_error(case):
    make, size, message = WRONG[case]
    with pytest.raises(shardcore.ShardcoreError, match=message):
        shardcore.resize(make(), size)


@pytest.mark.usefixtures("_single")
def test_slots_of_other_shapes_are_refused():
    model = with_head(WORDS)
    model.compile("adafactor", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(shardcore.errors.CallProblem, match="Adafactor has a slot"):
        shardcore.resize(model.layers[1], 12, model=model)
    assert model.layers[1].embeddings.shape == (WORDS, WIDTH)


def test_the_model_holds_the_new_parameter_alone():
    def program(_rank):
        shardcore.install("single")
        words = keras.layers.Embedding(6, 4, name="words")
        model = keras.Sequential([keras.Input((3,), dtype="int32"), words, keras.layers.Dense(2)])
        model.compile("adam", "mse")
        model.fit(np.ones((2, 3), "int32"), np.ones((2, 3, 2)), verbose=0)
        shardcore.resize(words, 8, model=model)
        return [tuple(parameter.shape) for parameter in model.parameters()]

    (shapes,) = run_ranks(program, 1)
    assert (8, 4) in shapes
    assert (6, 4) not in shapes


@pytest.mark.parametrize("strategy", ["single", "dtensor"])
def test_an_optimizer_with_old_slots_is_an_error_not_a_crash(strategy):
    def program(_rank):
        shardcore.install(strategy)
        if strategy == "dtensor":
            keras.distribution.set_distribution(keras.distribution.DataParallel())
        words = keras.layers.Embedding(1000, 64)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), words])
        model.compile("adam", "mse")
        data = np.ones((2, 3), "int32"), np.ones((2, 3, 64), "float32")
        model.train_on_batch(*data)
        shardcore.resize(words, 5000)
        with pytest.raises((RuntimeError, ValueError), match=r"size|shape"):
            model.train_on_batch(*data)

    run_ranks(program, 1)


@pytest.mark.parametrize("optimizer", ["ftrl", "adagrad"])
def test_accumulators_of_new_rows_begin_as_those_of_old_ones(optimizer):
    def program(_rank):
        shardcore.install("single")
        words = keras.layers.Embedding(4, 2)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), words])
        model.compile(optimizer, "mse")
        data = np.array([[0, 1, 2]]), np.ones((1, 3, 2))
        model.train_on_batch(*data)
        shardcore.resize(words, 6, model=model)
        model.train_on_batch(*data)
        slots = [slot for slot in model.optimizer.variables if "accumulator" in slot.path]
        rows = keras.ops.convert_to_numpy(slots[0])
        return rows[4:], np.isfinite(keras.ops.convert_to_numpy(words.embeddings)).all()

    ((rows, are_finite),) = run_ranks(program, 1)
    assert are_finite
    np.testing.assert_allclose(rows, np.full((2, 2), 0.1), rtol=1e-6)
