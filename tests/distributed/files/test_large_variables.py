"""Large variables: drawn, loaded and saved without a full value beside the shards."""

import gc
import zipfile
import zlib

import keras
import numpy as np
import pytest
import safetensors.numpy
from keras import initializers

import shardcore
from benchmarks import memory
from shardcore.testing import run_ranks
from tests.distributed.programs import distribute

MIB = 2**20
# Pieces of rows, with a last one that is no block of 16, and pieces of one index of the first dim.
SHAPES = [(500, 300), (150_001,), (3, 3, 100, 80)]
MAKERS = {
    "uniform": lambda: initializers.RandomUniform(-1, 2, seed=1),
    "normal": lambda: initializers.RandomNormal(1.0, 2.0, seed=2),
    "truncated": lambda: initializers.TruncatedNormal(seed=3),
    "scaled": initializers.HeNormal,  # by the global seed
    "orthogonal": lambda: initializers.Orthogonal(seed=4),  # drawn and then changed
}


def shard_last_dim(strategy):
    shardcore.install(strategy)
    mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
    rules = keras.distribution.LayoutMap(mesh)
    for ndim in range(1, 5):
        rules[f".*of_{ndim}_dims.*"] = (*[None] * (ndim - 1), "model")
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
    )


def values(dtype):
    keras.utils.set_random_seed(5)
    found = {}
    for name, make in MAKERS.items():
        for shape in SHAPES if name != "orthogonal" else SHAPES[:1] * (dtype == "float32"):
            variable = keras.Variable(
                make(), shape=shape, dtype=dtype, name=f"of_{len(shape)}_dims"
            )
            found[name, shape] = keras.ops.convert_to_numpy(variable).astype("float32")
    return found


@pytest.mark.parametrize("strategy", ["dtensor", "manual"])
def test_a_large_variable_begins_with_the_numbers_of_one_device(strategy):
    dtype = {"dtensor": "float32", "manual": "bfloat16"}[strategy]
    (expected,) = run_ranks(lambda _: values(dtype), 1)

    def drawn(_rank):
        shard_last_dim(strategy)
        return values(dtype)

    for found in run_ranks(drawn, 2):
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, str(name))


@pytest.mark.parametrize("initializer", ["glorot_uniform", "he_normal", "zeros"])
def test_a_rank_makes_its_shard_of_a_large_variable_and_no_full_value(initializer):
    def grown(_rank):
        shard_last_dim("dtensor")
        memory.map_large_blocks()
        keras.random.truncated_normal((10,))
        memory.begin()
        made = []

        def make():
            made.append(
                keras.Variable(initializer, shape=(4096, 4096), dtype="float32", name="of_2_dims")
            )

        return memory.peak(make)["process"] / MIB

    assert max(run_ranks(grown, 2)) < 32 + 12  # of 64 MiB a rank keeps 32


def layered():
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(2048, use_bias=False, name=f"of_2_dims_{n}") for n in range(2)]
    return keras.Sequential([keras.Input((2048,)), *hidden])


@pytest.mark.parametrize("name", ["a.weights.h5", "a.weights.json", "a.keras"])
def test_a_rank_reads_and_writes_one_variable_at_a_time(name, tmp_path):
    path = tmp_path / name

    def write(model, path):
        if name == "a.keras":
            model.save(path)
        else:
            model.save_weights(path, max_shard_size=0.02 if name.endswith("json") else None)

    def save(_rank):
        model = layered()
        write(model, path)
        return [float(abs(each).sum()) for each in model.get_weights()]

    def load(_rank):
        shard_last_dim("dtensor")
        memory.map_large_blocks()
        keras.random.uniform((10,))
        memory.begin()
        kept = []

        def read():
            model = keras.saving.load_model(path) if name == "a.keras" else layered()
            if name != "a.keras":
                model.load_weights(path)
            kept.append(model)

        grown = [memory.peak(read)["process"] / MIB]
        grown.append(
            memory.peak(lambda: write(kept[0], tmp_path / f"b{name[1:]}"))["process"] / MIB
        )
        return grown, [float(abs(each).sum()) for each in kept[0].get_weights()]

    (saved,) = run_ranks(save, 1)
    for grown, found in run_ranks(load, 2):
        # Shards of 16 MiB, and one variable of 16. A second one would take 58: 42 is usual, and 48
        # was seen in a process that had run other tests.
        assert max(grown) < 16 + 16 + 20
        np.testing.assert_allclose(found, saved, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does")  # not quantize
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_rank_quantizes_in_pieces_to_the_codes_of_one_device(mode):
    def build():
        keras.utils.set_random_seed(1)
        table = keras.layers.Embedding(2048, 2048)
        hidden = keras.layers.Dense(2048, use_bias=False)
        return keras.Sequential([keras.Input((2,), dtype="int32"), table, hidden])

    def quantized(model):
        gc.freeze()  # Keras collects garbage for each layer
        model.quantize(mode)
        return model

    def checksums(model):
        return [(each.dtype, zlib.crc32(each)) for each in model.get_weights()]

    def on_two(_rank):
        distribute((1, 2), {".*/(embeddings|kernel)": (None, "model")})
        memory.map_large_blocks()
        keras.random.uniform((10,))
        memory.begin()
        model = build()
        grown = memory.peak(lambda: quantized(model))["process"] / MIB
        return grown, checksums(model)

    (expected,) = run_ranks(lambda _: checksums(quantized(build())), 1)
    assert len(expected) >= 4
    for grown, found in run_ranks(on_two, 2):
        assert grown < 16 + 16 + 4 + 16  # shards, one variable, its codes, and pieces
        assert found == expected


def test_a_compressed_archive_is_read_too(tmp_path):
    plain, packed = tmp_path / "plain.keras", tmp_path / "packed.keras"

    def save(_rank):
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4, use_bias=False, name="of_2_dims")]
        )
        model.save(plain)
        return model.get_weights()

    (saved,) = run_ranks(save, 1)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for each in source.namelist():
            to.writestr(each, source.read(each))

    def load(_rank):
        shard_last_dim("dtensor")
        return keras.saving.load_model(packed).get_weights()

    for found in run_ranks(load, 2):
        for one, other in zip(found, saved, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("pattern", ["a b -> a b", "a b -> b a"])
def test_a_rank_reads_and_writes_files_of_others_with_room_for_its_shard(tmp_path, pattern):
    value = np.arange(4096 * 4096, dtype="float32").reshape(4096, 4096)
    safetensors.numpy.save_file({"w": value}, tmp_path / "old.safetensors")

    def grown(_rank):
        shard_last_dim("dtensor")
        keys = lambda path: ("w", pattern)  # noqa: E731
        model = keras.Sequential([keras.Input((4096,)), OfTwoDims()])
        memory.map_large_blocks()
        memory.begin()
        read = memory.peak(
            lambda: shardcore.load_safetensors(model, tmp_path / "old.safetensors", keys)
        )
        memory.begin()
        write = memory.peak(
            lambda: shardcore.save_safetensors(model, tmp_path / "new.safetensors", keys)
        )
        return read["process"] / MIB, write["process"] / MIB

    for read, write in run_ranks(grown, 2):
        assert read < 1.15 * 32
        assert write < 1.15 * 32
    np.testing.assert_array_equal(
        safetensors.numpy.load_file(tmp_path / "new.safetensors")["w"], value
    )


class OfTwoDims(keras.layers.Layer):
    def build(self, shape):
        self.add_weight(shape=(4096, 4096), name="of_2_dims")
