"""`keras.distribution`: meshes, layouts and layout maps, on real ranks."""

import keras
import numpy as np
import pytest
from keras import distribution as kd

import shardcore
from shardcore.domain.errors import LayoutError, MeshError, RuleError
from tests.distributed.keras_distribution.installed import installed, mesh_1_2


def test_a_device_mesh_orders_the_processes():
    def program(rank):
        mesh = kd.DeviceMesh((2, 1), ("data", "model"), devices=["cpu:1", "cpu:0"])
        kd.set_distribution(kd.DataParallel(device_mesh=kd.DeviceMesh((2,), ["b"], mesh.devices)))
        rows = shardcore.ensure_dtensor_input(np.arange(4.0))
        return mesh.devices.tolist(), rows.to_local().tolist()

    reverse = [["cpu:1"], ["cpu:0"]]
    assert installed(program, 2) == [(reverse, [2.0, 3.0]), (reverse, [0.0, 1.0])]


MESHES = {
    "one device of two": (((1,), ["a"], ["cpu:0"]), r"has 1 devices, but the job has 2 processes"),
    "a device twice": (((2,), ["a"], ["cpu:0", "cpu:0"]), "give each device once"),
    "a device without number": (((2,), ["a"], ["cpu", "cpu:1"]), "'cpu' has no number"),
    "an axis twice": (((1, 2), ["a", "a"], None), "'a'"),
}


@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_that_cannot_be(case):
    arguments, message = MESHES[case]

    def program(rank):
        data_parallel = kd.DataParallel(device_mesh=kd.DeviceMesh((2,), ["batch"]))
        kd.set_distribution(data_parallel)
        wrong = kd.ModelParallel(layout_map=kd.LayoutMap(kd.DeviceMesh(*arguments)))
        with pytest.raises(MeshError, match=message):
            kd.set_distribution(wrong)
        # What was set before still is, and works.
        assert kd.distribution() is data_parallel
        keras.Variable(np.ones(2)).assign(np.zeros(2))

    installed(program, 2)


def test_a_mesh_of_too_few_devices_names_the_remedy():
    def program(rank):
        mesh = kd.DeviceMesh((1,), ["batch"], ["cpu:0"])
        with pytest.raises(MeshError, match=r"list_devices\(\).*torchrun --nproc_per_node"):
            kd.set_distribution(kd.DataParallel(device_mesh=mesh))

    installed(program, 2)


def test_tensor_layout_takes_several_axes_on_one_dim():
    def program(rank):
        mesh = kd.DeviceMesh((2, 2), ("data", "model"))
        tensor = np.arange(8.0)
        inner, outer = (
            kd.distribute_tensor(tensor, kd.TensorLayout((axes,), mesh)).to_local().tolist()
            for axes in (("data", "model"), ("model", "data"))
        )
        return inner, outer

    rows = np.arange(8.0).reshape(4, 2).tolist()
    swapped = [rows[0], rows[2], rows[1], rows[3]]
    assert installed(program, 4) == list(zip(rows, swapped, strict=True))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("model", "model"), "'model'"),
        ((("model", "data"), "data"), "'data'"),
        (("modell",), r"Invalid axis names.*'modell'.*'data'.*'model'"),
    ],
)
def test_tensor_layout_refuses(axes, message):
    def program(rank):
        with pytest.raises(LayoutError, match=message):
            kd.TensorLayout(axes, mesh_1_2())
        layout_map = kd.LayoutMap(mesh_1_2())
        with pytest.raises(LayoutError, match=message):
            layout_map["kernel"] = axes
        return len(layout_map)

    assert installed(program, 2) == [0, 0]


def test_tensor_layout_gets_its_mesh_later_and_once():
    def program(rank):
        layout = kd.TensorLayout((None, "model"))
        with pytest.raises(LayoutError, match="no device mesh"):
            _ = layout.backend_layout
        layout.device_mesh = mesh_1_2()
        with pytest.raises(ValueError, match="Cannot override device mesh"):
            layout.device_mesh = mesh_1_2()
        return str(layout.backend_layout)

    assert installed(program, 2) == ["(None, 'model')"] * 2


def test_layout_map_is_the_mapping_that_keras_describes():
    def program(rank):
        layout_map = kd.LayoutMap(mesh_1_2())
        layout_map[".*dense.*kernel"] = (None, "model")
        layout_map["dense_2/kernel"] = kd.TensorLayout(("model", None))
        assert layout_map["dense_1/kernel"].axes == (None, "model")
        assert layout_map["dense_2/kernel"].axes == ("model", None)  # exact goes first
        assert layout_map["dense_2/kernel"].device_mesh is layout_map.device_mesh
        assert layout_map["block/dense_1/kernel/more"] is None  # the whole path or nothing
        assert layout_map.get("conv/kernel") is None
        assert list(layout_map) == [".*dense.*kernel", "dense_2/kernel"]
        assert [layout.axes[0] for layout in layout_map.values()] == [None, "model"]
        with pytest.raises(ValueError, match="already exist"):
            layout_map["dense_2/kernel"] = ("model", None)
        with pytest.raises(ValueError, match="should be a TensorLayout"):
            layout_map["other"] = "model"
        del layout_map["dense_2/kernel"]
        assert layout_map["dense_2/kernel"].axes == (None, "model")
        layout_map["conv/kernel"] = ("model", None)
        assert layout_map["conv/kernel"].axes == ("model", None)
        del layout_map["conv/kernel"]
        layout_map["conv/kernel"] = (None, "model")
        assert layout_map["conv/kernel"].axes == (None, "model")
        layout_map["dense_2/.*"] = ("model", None)
        with pytest.raises(
            RuleError, match=r"at most may match: '\.\*dense\.\*kernel', 'dense_2/\.\*'"
        ):
            layout_map["dense_2/kernel"]
        with pytest.raises(RuleError, match=r"regular expression"):
            layout_map["dense_[2/kernel"] = ("model", None)
        return len(layout_map)

    assert installed(program, 2) == [3, 3]


def test_distribute_tensor():
    def program(rank):
        layout = kd.TensorLayout((None, "model"), mesh_1_2())
        value = np.arange(6.0).reshape(2, 3)
        once = kd.distribute_tensor(value, layout)
        back = kd.distribute_tensor(once, kd.TensorLayout((None, None), mesh_1_2()))
        with pytest.raises(LayoutError, match=r"shape \(3,\), but its layout"):
            kd.distribute_tensor(np.ones(3), layout)
        symbolic = keras.KerasTensor((2, 3))
        assert kd.distribute_tensor(symbolic, layout) is symbolic
        return once.shape, once.to_local().tolist(), back.to_local().tolist()

    value = np.arange(6.0).reshape(2, 3)
    for rank, (shape, local, back) in enumerate(installed(program, 2)):
        assert shape == (2, 3)
        assert local == np.array_split(value, [2], axis=1)[rank].tolist()
        assert back == value.tolist()
