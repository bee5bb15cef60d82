"""The functions below Keras, against NumPy over the values of all ranks."""

import keras
import numpy as np
import pytest

import shardcore
from shardcore.domain.errors import LayoutError, MeshError
from shardcore.testing import run_ranks
from tests.distributed.programs import (
    IS_ON_GPU,
    as_arrays,
    assert_close,
    distribute,
    local,
    placements,
)

# What rank r gives: its own values, of one shape. As an array over the mesh: (2, 2, 2, 3).
GIVEN = np.random.default_rng(0).uniform(0.5, 2, size=(4, 2, 3)).astype("float32")
OVER_THE_MESH = GIVEN.reshape(2, 2, 2, 3)
REDUCTIONS = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "product": np.prod}
MESH_AXES = {"data": (0,), "model": (1,), None: (0, 1)}
WHOLE = np.arange(24, dtype="float32").reshape(4, 6)


def test_all_reduce_is_numpy_s_reduction_over_the_mesh():
    def program(rank):
        distribute((2, 2))
        reduced = {
            f"{op} over {axis}": shardcore.all_reduce(GIVEN[rank], op, axis)
            for op in REDUCTIONS
            for axis in MESH_AXES
        }
        return as_arrays(reduced | {"default": shardcore.all_reduce(GIVEN[rank])})

    expected = {
        f"{op} over {axis}": np.broadcast_to(
            reduce(OVER_THE_MESH, axis=along, keepdims=True), OVER_THE_MESH.shape
        ).reshape(GIVEN.shape)
        for op, reduce in REDUCTIONS.items()
        for axis, along in MESH_AXES.items()
    } | {"default": np.broadcast_to(GIVEN.sum(0), GIVEN.shape)}
    for rank, result in enumerate(run_ranks(program, 4)):
        assert_close([result], {name: value[rank] for name, value in expected.items()})


def test_all_gather_is_numpy_s_concatenation():
    cases = [(dim, axis) for dim in (0, 1, -1, -2) for axis in MESH_AXES]

    def program(rank):
        distribute((2, 2))
        gathered = {
            str(case): shardcore.all_gather(GIVEN[rank], axis=case[0], axis_name=case[1])
            for case in cases
        }
        return as_arrays(gathered)

    for rank, result in enumerate(run_ranks(program, 4)):
        data, model = divmod(rank, 2)
        groups = {"data": GIVEN[model::2], "model": OVER_THE_MESH[data], None: GIVEN}
        expected = {str((dim, axis)): np.concatenate(groups[axis], dim) for dim, axis in cases}
        assert_close([result], expected, atol=0)


def test_tensors_are_laid_out_and_read_back():
    def program(rank):
        distribution = distribute((2, 2))
        by_layout = keras.distribution.TensorLayout(("data", None), distribution.device_mesh)
        sharded = shardcore.distribute_tensor(WHOLE, ("data", "model"))
        plain = keras.ops.convert_to_tensor(WHOLE)
        tensors = [
            sharded,
            shardcore.distribute_tensor(sharded, by_layout),
            shardcore.distribute_tensor(plain, (("model", "data"), None)),
            shardcore.ensure_dtensor(plain),
            shardcore.ensure_dtensor(plain, (None, "model")),
            shardcore.ensure_dtensor(sharded),
            shardcore.ensure_dtensor(sharded, (None, None)),
            shardcore.ensure_dtensor(keras.Variable(WHOLE)),
        ]
        parts = [tensor.to_local().detach().cpu().numpy() for tensor in tensors]
        return parts, [keras.ops.convert_to_numpy(tensor) for tensor in tensors]

    for rank, (parts, wholes) in enumerate(run_ranks(program, 4)):
        for whole in wholes:
            np.testing.assert_array_equal(whole, WHOLE)
        data, model = divmod(rank, 2)
        rows, columns = np.split(WHOLE, 2), np.split(WHOLE, 2, axis=1)
        expected = [
            np.split(rows[data], 2, axis=1)[model],
            rows[data],
            np.split(WHOLE, 4)[2 * model + data],
            WHOLE,
            columns[model],
            np.split(rows[data], 2, axis=1)[model],
            WHOLE,
            WHOLE,
        ]
        for number, (part, value) in enumerate(zip(parts, expected, strict=True)):
            np.testing.assert_array_equal(part, value, err_msg=f"tensor {number}")


def test_a_batch_is_sharded_as_fit_shards_it():
    def program(rank):
        distribute((2, 2))
        batch = {"x": WHOLE, "more": (WHOLE[:, 0], np.float32(3)), "none": None}
        sharded = shardcore.ensure_dtensor_input(batch)
        parts = as_arrays([sharded["x"].to_local(), sharded["more"][0].to_local()])
        return *parts, placements(sharded["x"]), float(sharded["more"][1]), sharded["none"]

    for rank, (x, column, placed, number, none) in enumerate(run_ranks(program, 4)):
        rows = slice(0, 2) if rank < 2 else slice(2, 4)
        np.testing.assert_array_equal(x, WHOLE[rows])
        np.testing.assert_array_equal(column, WHOLE[rows, 0])
        assert (placed, number, none) == ("S(0) R", 3.0, None)


def test_a_variable_is_redistributed_and_gathered():
    def program(rank):
        before = keras.Variable(WHOLE + rank, name="before")
        distribution = distribute((2, 2), {"before": ("data", None)})
        by_layout = keras.distribution.TensorLayout((None, "model"), distribution.device_mesh)
        seen = []
        for layout in (None, by_layout, ("model", None)):
            assert shardcore.distribute_variable(before, layout) is before
            whole = shardcore.all_gather_variable(before)
            seen.append(
                (placements(before._value), local(before), placements(whole), whole.cpu().numpy())
            )
        return seen

    for rank, seen in enumerate(run_ranks(program, 4)):
        data, model = divmod(rank, 2)
        expected = [
            ("S(0) R", np.split(WHOLE, 2)[data]),
            ("R S(1)", np.split(WHOLE, 2, axis=1)[model]),
            ("R S(0)", np.split(WHOLE, 2)[model]),
        ]
        for (placed, part, plain, whole), (words, value) in zip(seen, expected, strict=True):
            assert (placed, plain) == (words, "plain")
            np.testing.assert_array_equal(part, value)
            np.testing.assert_array_equal(whole, WHOLE)  # rank 0's


def test_the_status_shows_the_mesh():
    def program(rank):
        distribute((2, 2))
        return shardcore.mesh_info()

    kind = "gpu" if IS_ON_GPU else "cpu"
    devices = [[f"{kind}:{2 * row + column}" for column in range(2)] for row in range(2)]
    expected = {"shape": (2, 2), "axis_names": ("data", "model"), "devices": devices}
    assert run_ranks(program, 4) == [expected] * 4


def test_wrong_arguments_are_refused_by_name_before_any_communication():
    def program(rank):
        distribute((2, 1))
        if rank:  # no rank waits for this one
            return
        sharded = shardcore.distribute_tensor(WHOLE, ("data", None))
        with pytest.raises(MeshError, match="nowhere"):
            shardcore.all_reduce(WHOLE, "sum", "nowhere")
        with pytest.raises(MeshError, match="nowhere"):
            shardcore.all_gather(WHOLE, 0, "nowhere")
        with pytest.raises(LayoutError, match="mean"):
            shardcore.all_reduce(WHOLE, "mean")
        with pytest.raises(LayoutError, match=r"dim 2, but the tensor has shape \(4, 6\)"):
            shardcore.all_gather(WHOLE, 2)
        with pytest.raises(LayoutError, match="all_reduce takes a plain tensor"):
            shardcore.all_reduce(sharded)
        with pytest.raises(LayoutError, match=r"shape \(4, 6\), but its layout .* 1 dims"):
            shardcore.distribute_tensor(WHOLE, ("data",))
        with pytest.raises(LayoutError, match="'nowhere'"):
            shardcore.ensure_dtensor(WHOLE, ("nowhere", None))

    run_ranks(program, 2, timeout=20)
