"""LoRA: the kernel keeps its layout, the adapters take theirs by rule, files have them merged."""

import pkgutil
import time

import keras
import numpy as np
import pytest
from keras import layers

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_close, distribute, placements

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 10, size=(6, 3))
TARGETS = RANDOM.normal(size=(6, 3, 4)).astype("float32")

RULES = {
    "table/embeddings": ("model", None),
    "heads/kernel": (None, "model", None),
    ".*/up/kernel": (None, "model"),
    ".*/up/lora_kernel_b": (None, "model"),
    ".*/down/kernel": ("model", None),
    ".*/down/lora_kernel_a": ("model", None),
    "table/lora_embeddings_a": ("model", None),
}


def built():
    keras.utils.set_random_seed(1)
    tokens = keras.Input((3,), dtype="int64")
    x = layers.Embedding(10, 8, name="table")(tokens)
    x = layers.EinsumDense("abc,cde->abde", (None, 2, 6), name="heads")(x)
    x = layers.Reshape((3, 12))(x)
    block = [layers.Dense(6, "gelu", name="up"), layers.Dense(4, name="down")]
    return keras.Model(tokens, keras.Sequential(block, name="block")(x))


def adapted(model):
    for layer in model._flatten_layers():
        if hasattr(layer, "enable_lora"):
            layer.enable_lora(2, lora_alpha=3)
    return model


def trained(model):
    """The losses of three steps, then every variable whole, and the predictions."""
    model.compile(keras.optimizers.Adam(0.05, epsilon=1e-2), "mse")
    losses = [float(model.train_on_batch(TOKENS, TARGETS)) for _ in range(3)]
    results = {f"{n} {v.path}": v.numpy() for n, v in enumerate(model.variables)}
    predictions = model.predict(TOKENS, batch_size=4, verbose=0)
    return results | {"losses": np.array(losses), "predictions": predictions}


def test_adapters_train_and_merge_as_on_one_device(tmp_path):
    file = str(tmp_path / "m.weights.h5")

    def program(rank):
        one_device = trained(adapted(built()))
        plain = built()
        distribute((1, 2), RULES)
        model = adapted(built())
        results = trained(model)
        assert shardcore.rules_report(model).unused_rules == ()
        placed = {v.path: placements(v._value) for v in model.variables}
        model.save_weights(file)  # merged
        loaded = built()
        loaded.load_weights(file)
        keras.distribution.set_distribution(None)
        plain.load_weights(file)
        merged = plain.predict(TOKENS, verbose=0)
        return one_device, results, merged, loaded.get_weights(), plain.get_weights(), placed

    for one_device, results, merged, loaded, plain, placed in run_ranks(program, 2):
        assert_close([results], one_device)
        np.testing.assert_allclose(merged, results["predictions"], atol=1e-5)
        for ours, theirs in zip(loaded, plain, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert placed["block/up/kernel"] == placed["block/up/lora_kernel_b"] == "R S(1)"
        assert placed["block/down/kernel"] == placed["block/down/lora_kernel_a"] == "R S(0)"
        assert placed["block/up/lora_kernel_a"] == "R R"  # no rule for kernels catches it


def test_adapters_of_before_the_distribution_move_with_their_kernel():
    def program(rank):
        one_device = trained(adapted(built()))
        model = adapted(built())
        distribute((1, 2), RULES)
        for variable in model.variables:
            shardcore.distribute_variable(variable)
        results = trained(model)
        return one_device, results, placements(model.get_layer("block").layers[0].kernel)

    for one_device, results, kernel in run_ranks(program, 2):
        assert_close([results], one_device)
        assert kernel == "R S(1)"


def test_a_rule_for_kernels_leaves_the_adapters_alone_and_a_wider_one_takes_them():
    def program(rank):
        found = {}
        for rule in (".*kernel", ".*kernel.*", ".*/(kernel|lora_kernel_b)"):
            distribute((1, 2), {rule: (None, "model")})
            x = keras.Input((4,))
            model = adapted(keras.Model(x, layers.Dense(6, name="up")(x)))
            taken = [v.name for v in model.variables if placements(v._value) == "R S(1)"]
            found[rule] = sorted(taken)
        return found

    assert run_ranks(program, 2)[0] == {
        ".*kernel": ["kernel"],
        ".*kernel.*": ["kernel", "lora_kernel_a", "lora_kernel_b"],
        ".*/(kernel|lora_kernel_b)": ["kernel", "lora_kernel_b"],
    }


def test_one_rank_writes_a_file_of_adapters_under_a_distribution_and_after_clear_session(tmp_path):
    """As `save_lora_weights` of keras-hub does, which opens Keras' store of files itself."""
    store_of = pkgutil.resolve_name("keras.src.saving.saving_lib:H5IOStore")

    def write(file, value):
        store = store_of(tmp_path / file, mode="w")
        store.make("table")["a"] = value
        time.sleep(0.1)  # the other rank has it open, too
        store.close()

    def read(file):
        return store_of(tmp_path / file, mode="r").get("table")["a"][()]

    def results(rank):
        sharded = adapted(built()).get_layer("table").lora_embeddings_a
        write("all.lora.h5", sharded)
        found = read("all.lora.h5")  # complete on every rank
        with pytest.raises(FileNotFoundError, match=r"nowhere/all\.lora\.h5"):
            write("nowhere/all.lora.h5", sharded)
        if rank == 0:
            write("own.lora.h5", np.arange(2.0))
            np.testing.assert_array_equal(read("own.lora.h5"), [0, 1])
        return found, sharded.numpy()

    def program(rank):
        distribute((1, 2), RULES)
        distributed = results(rank)
        keras.utils.clear_session()
        return distributed, results(rank)

    for pairs in run_ranks(program, 2):
        for found, expected in pairs:
            np.testing.assert_array_equal(found, expected)
