"""`keras.distribution`, name by name, on real ranks."""

import logging
import os
import socket

import keras
import numpy as np
import pytest
import torch.distributed as dist
from keras import distribution as kd

import shardcore
from shardcore.adapters.job.forked_ranks import free_port
from shardcore.domain.errors import EnvironmentProblem, LayoutError, MeshError, RuleError
from shardcore.testing import run_ranks

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def installed(program, world_size, *args, init=True):
    """Runs `program(rank, *args)` on ranks where shardcore is installed."""

    def with_shardcore(rank):
        shardcore.install("dtensor")
        return program(rank, *args)

    return run_ranks(with_shardcore, world_size, init=init)


def without_launcher():
    for name in TORCHRUN:
        del os.environ[name]


def mesh_1_2():
    return kd.DeviceMesh((1, 2), ("data", "model"))


# --- the job --------------------------------------------------------------------------------------


def test_initialize_by_torchrun_s_variables():
    def program(rank):
        before = dist.is_initialized()
        kd.initialize()
        kd.initialize()
        return before, dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert installed(program, 2, init=False) == [(False, 0, 2, "gloo"), (False, 1, 2, "gloo")]


@pytest.mark.parametrize("given_by", ["arguments", "environment"])
def test_initialize_by_arguments_and_keras_variables_before_torchrun_s(given_by):
    """The ranks are given in reverse of torchrun's, so that it shows who wins."""
    port = free_port()
    addresses = f"127.0.0.1:{port},127.0.0.1:{port + 1}"

    def program(rank):
        if given_by == "arguments":
            os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] = str(rank)
            kd.initialize(addresses, num_processes=2, process_id=1 - rank)
        else:
            os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"] = addresses
            os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"] = "2"
            os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] = str(1 - rank)
            kd.initialize()
        data_parallel = kd.DataParallel()
        return dist.get_rank(), data_parallel._process_id, data_parallel.num_processes

    assert installed(program, 2, init=False) == [(1, 1, 2), (0, 0, 2)]


def test_initialize_counts_the_addresses():
    def program(rank):
        with pytest.raises(EnvironmentProblem, match=r"one address per process, got 3 .* 2 proc"):
            kd.initialize("a:1,b:2,c:3", num_processes=2, process_id=rank)
        return dist.is_initialized()

    assert installed(program, 1, init=False) == [False]


def test_without_a_launcher_there_is_one_device_and_initialize_does_nothing():
    def program(rank):
        without_launcher()
        kd.initialize()
        model_parallel = kd.ModelParallel(
            layout_map=kd.LayoutMap(kd.DeviceMesh((1, 1), ("data", "model")))
        )
        return dist.is_initialized(), kd.list_devices(), model_parallel.num_processes

    assert installed(program, 1, init=False) == [(False, ["cpu:0"], 1)]


def test_the_ranks_draw_from_one_seed():
    def program(rank):
        kd.list_devices()
        return np.random.normal(), float(keras.random.normal(()))

    first, second = installed(program, 2, init=False)
    assert first == second
    assert first != installed(program, 2, init=False)[0]


def test_a_seed_of_the_user_is_kept():
    def program(rank):
        keras.utils.set_random_seed(5)
        kd.list_devices()
        return np.random.normal()

    assert installed(program, 2, init=False) == [np.random.RandomState(5).normal()] * 2


@pytest.mark.parametrize("given", [None, "cpu", "CPU"])
def test_devices_are_those_of_the_whole_job(given):
    def program(rank):
        return kd.list_devices(given), kd.get_device_count(given)

    assert installed(program, 2) == [(["cpu:0", "cpu:1"], 2)] * 2


@pytest.mark.parametrize("given", ["gpu", "tpu"])
def test_devices_of_a_kind_that_is_not_here(given):
    assert installed(lambda rank: (kd.list_devices(given), kd.get_device_count(given)), 1) == [
        ([], 0)
    ]


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_one_rank_computes_on_another_accelerator(device):
    def program(rank):
        without_launcher()
        os.environ["KERAS_TORCH_DEVICE"] = device  # as if Keras computed there
        mesh = kd.DeviceMesh((1, 1), ("data", "model"))
        return kd.list_devices(), kd.list_devices(device), kd.list_devices("cpu"), mesh.shape

    names = [f"{device}:0"]
    assert installed(program, 1, init=False) == [(names, names, ["cpu:0"], (1, 1))]


def test_several_ranks_on_another_accelerator_are_refused():
    def program(rank):
        os.environ["KERAS_TORCH_DEVICE"] = "mps"
        with pytest.raises(EnvironmentProblem, match="computes on 'mps', which serves one rank"):
            kd.list_devices()

    installed(program, 2)  # their group is started
    installed(program, 2, init=False)


def test_an_unknown_kind_of_device_is_an_error():
    def program(rank):
        with pytest.raises(MeshError, match="device type 'quantum': give 'cpu', 'gpu' or 'tpu'"):
            kd.list_devices("quantum")

    installed(program, 1)


# --- meshes ---------------------------------------------------------------------------------------


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


# --- layouts --------------------------------------------------------------------------------------


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


# --- the distribution that is set -----------------------------------------------------------------


def placement_of(variable):
    """The placements of the new variable."""
    return " ".join(map(str, variable.value.placements)) if variable._layout else "plain"


def new_variable():
    return placement_of(keras.Variable(np.ones((2, 2)), name="kernel"))


def column_parallel():
    layout_map = kd.LayoutMap(mesh_1_2())
    layout_map["kernel"] = (None, "model")
    return kd.ModelParallel(layout_map=layout_map)


def test_set_distribution_and_none():
    def program(rank):
        seen = [kd.distribution(), new_variable()]
        model_parallel = column_parallel()
        kd.set_distribution(model_parallel)
        seen += [kd.distribution() is model_parallel, new_variable()]
        kd.set_distribution(None)
        return [*seen, kd.distribution(), new_variable()]

    assert installed(program, 2) == [[None, "plain", True, "R S(1)", None, "plain"]] * 2


def test_scope_nests_and_is_left_by_exceptions_too():
    def program(rank):
        outer, inner = column_parallel(), kd.DataParallel()
        seen = []

        def fail_inside():
            with inner.scope():
                seen.extend([kd.distribution() is inner, new_variable()])
                raise KeyError

        with outer.scope():
            with pytest.raises(KeyError):
                fail_inside()
            seen += [kd.distribution() is outer, new_variable()]
        return [*seen, kd.distribution(), new_variable()]

    expected = [True, "R", True, "R S(1)", None, "plain"]
    assert installed(program, 2) == [expected] * 2


def test_clear_session_leaves_the_distribution():
    def program(rank):
        kd.set_distribution(column_parallel())
        before = new_variable()
        keras.utils.clear_session()
        return before, kd.distribution(), new_variable()

    assert installed(program, 2) == [("R S(1)", None, "plain")] * 2


def test_two_distributions_one_after_another():
    def program(rank):
        x, y = np.ones((4, 2)), np.ones((4, 2))
        losses = []
        for distribution in (column_parallel(), kd.DataParallel(), column_parallel()):
            keras.utils.set_random_seed(1)
            kd.set_distribution(distribution)
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            losses.append([model.train_on_batch(x, y) for _ in range(2)])
        return losses

    for first, second, third in installed(program, 2):
        assert first == third
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-6)
        assert first[0] > first[1]


# --- the examples in Keras' own docstrings --------------------------------------------------------


def test_the_examples_of_layout_map_and_model_parallel():
    def program(rank):
        devices = kd.list_devices()  # 8 devices
        local = []
        for shape in ((2, 4), (1, 8)):
            device_mesh = kd.DeviceMesh(shape=shape, axis_names=("batch", "model"), devices=devices)
            layout_map = kd.LayoutMap(device_mesh)
            layout_map[".*dense.*kernel"] = (None, "model")
            layout_map[".*dense.*bias"] = ("model",)
            layout_map[".*conv2d.*kernel"] = (None, None, None, "model")
            layout_map[".*conv2d.*bias"] = ("model",)
            distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
            kd.set_distribution(distribution)
            dense = keras.layers.Dense(16, name="dense_1")
            dense.build((None, 4))
            conv2d = keras.layers.Conv2D(8, 3, name="conv2d_123")
            conv2d.build((None, 5, 5, 3))
            both = [dense.kernel, dense.bias, conv2d.kernel, conv2d.bias]
            local.append([tuple(v.value.to_local().shape) for v in both])
            assert layout_map["my_model/conv3d_1/kernel"] is None
            assert layout_map["my_model/conv2d_123/bias"].axes == ("model",)
        return local

    four = [(4, 4), (4,), (3, 3, 3, 2), (2,)]
    eight = [(4, 2), (2,), (3, 3, 3, 1), (1,)]
    assert installed(program, 8) == [[four, eight]] * 8


def test_a_batch_axis_that_the_mesh_lacks_is_named():
    def program(rank):
        layout_map = kd.LayoutMap(mesh_1_2())
        with pytest.raises(LayoutError, match=r"batch_dim_name='rows'.*\('data', 'model'\)"):
            kd.ModelParallel(layout_map=layout_map, batch_dim_name="rows")

    installed(program, 2)


def test_a_rule_with_a_wrong_axis_is_named_and_not_kept():
    def program(rank):
        shardcore.install("dtensor")
        mesh = keras.distribution.DeviceMesh((1, 1), ("data", "model"))
        rules = keras.distribution.LayoutMap(mesh)
        with pytest.raises(ValueError, match=r"Rule '\.\*kernel': Invalid axis names.*'modle'"):
            rules[".*kernel"] = (None, "modle")
        return len(rules)

    assert run_ranks(program, 1, init=False) == [0]


def on_two_hosts(rank, shape, axis_names):
    """Returns what is logged where a distribution is set, and the hosts in the status."""
    socket.gethostname = lambda: f"host-{rank // 2}"
    messages, logger = [], logging.getLogger("shardcore.session")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    shardcore.install("dtensor")
    mesh = kd.DeviceMesh(shape, axis_names)
    for _ in range(2):
        distribution = kd.ModelParallel(layout_map=kd.LayoutMap(mesh), batch_dim_name="data")
        kd.set_distribution(distribution)
        keras.layers.Dense(2).build((4, 4))
    return messages, shardcore.status().hosts


def test_a_model_axis_that_crosses_hosts_has_one_warning():
    for messages, hosts in run_ranks(on_two_hosts, 4, (2, 2), ("model", "data")):
        assert hosts == ("host-0", "host-0", "host-1", "host-1")
        (message,) = messages
        assert "Mesh axis 'model' crosses hosts: its ranks 0, 2 are on host-0, host-1" in message
    for messages, _ in run_ranks(on_two_hosts, 4, (2, 2), ("data", "model")):
        assert messages == []
