"""install(), uninstall() and status() on the real Keras."""

import importlib
import io
import logging
import os
import pkgutil
import subprocess
import sys

import keras
import numpy as np
import pytest
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.binding.keras_private import PATCHES
from shardcore.binding.keras_private.lines import LINE
from shardcore.domain.errors import EnvironmentProblem, StrategyError
from shardcore.testing import run_ranks
from tests import warm


def python(program, *arguments, **env):
    """Runs a program in a fresh interpreter, with nothing of this one's choices."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", "SHARDCORE_LOG")}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=inherited | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def forked(program, *arguments, **env):
    """Runs a program in a process forked from this one, whose modules are loaded."""
    chosen = ("KERAS_BACKEND", "SHARDCORE_LOG")
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    return warm.run(["-c", program, *arguments], inherited | env)


def in_one_process(program, *args):
    """Runs `program(*args)` in a separate process, which no other test sees."""
    return run_ranks(lambda rank: program(*args), 1, init=False)[0]


# --- once, twice, away ----------------------------------------------------------------------------


def test_install_is_idempotent():
    def program():
        first = shardcore.install("dtensor")
        before = keras_names()
        assert shardcore.install("dtensor") == shardcore.install("auto") == first
        assert keras_names() == before
        shardcore.uninstall()
        shardcore.uninstall()
        return shardcore.status().installed

    assert in_one_process(program) is False


def test_another_strategy_needs_an_uninstall_first():
    def program():
        shardcore.install("dtensor")
        with pytest.raises(StrategyError, match=r"'dtensor', so .*'single': call shardcore\.unin"):
            shardcore.install("single")
        kept = shardcore.status().strategy
        shardcore.uninstall()
        return kept, shardcore.install("single").strategy

    assert in_one_process(program) == ("dtensor", "single")


def test_status_tells_what_is_in_use():
    def program(rank):
        before = shardcore.status()
        shardcore.install()
        mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=keras.distribution.LayoutMap(mesh))
        )
        return before, shardcore.status()

    for rank, (before, status) in enumerate(run_ranks(program, 2)):
        assert (before.installed, before.strategy, before.devices) == (False, None, ())
        assert (status.installed, status.strategy) == (True, "dtensor")
        passed_over = dict.fromkeys(["manual", "single"], "'dtensor' has precedence.")
        assert status.passed_over == passed_over
        assert (status.mesh_shape, status.axis_names) == ((1, 2), ("data", "model"))
        assert (status.devices, status.rank, status.world_size) == (("cpu:0", "cpu:1"), rank, 2)
        assert status.versions["keras"] == keras.__version__
        assert "data=1, model=2" in str(status)


# --- names ----------------------------------------------------------------------------------------


def keras_names():
    """Every name in Keras' modules and in the classes that they define, and its value."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "keras" or module is None:
            continue
        for key, value in vars(module).items():
            found[f"{name}:{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                members = vars(value).items()
                found |= {f"{name}:{key}.{k}": id(v) for k, v in members if k != "__doc__"}
    return found


def holder_of(patch):
    """The module or class that has the name of a patch, and the name in it."""
    module, _, path = patch.place.partition(":")
    within, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{within}"), name


def name_of(patch):
    """The name of a patch as in `keras_names`: Keras gives some classes another module."""
    holder, name = holder_of(patch)
    is_class = isinstance(holder, type)
    return f"{holder.__module__}:{holder.__name__}.{name}" if is_class else patch.place


def importers(module, name):
    """The other modules of Keras that have the value of `module.name`, under that name."""
    value = getattr(importlib.import_module(module), name)
    return {
        f"{other}:{name}"
        for other, each in sys.modules.items()
        if other.partition(".")[0] == "keras" and getattr(each, name, None) is value
    }


def test_install_replaces_the_names_of_the_table_and_uninstall_restores_every_one():
    def program():
        expected, importing = {name_of(patch) for patch in PATCHES.values()}, set()
        for patch in PATCHES.values():
            if patch.everywhere:
                importing |= importers(*patch.place.split(":"))
        assert importing - expected
        before = keras_names()
        shardcore.install()
        during = keras_names()
        shardcore.uninstall()
        after = keras_names()
        changed = {name for name in during if before.get(name) != during[name]}
        left = {name for name in after | before if before.get(name) != after.get(name)}
        return expected | importing, changed, left

    expected, changed, left = in_one_process(program)
    assert changed == expected
    assert left == set()


@pytest.mark.parametrize("patch", PATCHES)
def test_uninstall_restores(patch):
    """Name by name, so that the report names the one that is wrong."""

    def program():
        holder, name = holder_of(PATCHES[patch])
        before = vars(holder).get(name)  # None: a class inherits it
        shardcore.install()
        during = vars(holder)[name]
        shardcore.uninstall()
        return during is not before, vars(holder).get(name) is before

    assert in_one_process(program) == (True, True)


def test_names_imported_before_install_work():
    def program(rank):
        from keras.distribution import DataParallel, DeviceMesh, distribution, set_distribution
        from keras.ops import convert_to_numpy
        from keras.utils import clear_session

        shardcore.install("dtensor")
        set_distribution(DataParallel(device_mesh=DeviceMesh((2,), ["batch"])))
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        # A plain tensor meets a sharded one: the scope of the distribution is entered.
        y = model(keras.ops.ones((4, 3))) + keras.ops.ones((4, 2))
        shape = convert_to_numpy(y).shape
        clear_session()
        return shape, distribution() is None

    assert run_ranks(program, 2) == [((4, 2), True)] * 2


# --- what installing costs ------------------------------------------------------------------------


def train():
    """Weights and losses of a small model that has most kinds of state."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 6)), rng.normal(size=(20, 3))
    history = model.fit(x, y, batch_size=8, epochs=2, validation_split=0.2, verbose=0).history
    return history, [*model.get_weights(), model.predict(x, verbose=0)]


def test_without_a_distribution_the_numbers_are_keras_own():
    def program(install):
        if install:
            shardcore.install("dtensor")
        return train()

    history, arrays = in_one_process(program, True)
    expected_history, expected_arrays = in_one_process(program, False)
    assert history == expected_history
    for array, expected in zip(arrays, expected_arrays, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_after_uninstall_keras_is_keras():
    def program(rank, install):
        if install:
            shardcore.install("dtensor")
            keras.distribution.set_distribution(keras.distribution.DataParallel())
            assert isinstance(keras.Variable(np.ones(2)).value, DTensor)
            shardcore.uninstall()
        try:
            devices = keras.distribution.list_devices()
        except AttributeError:  # Keras 3.15 cannot on torch
            devices = None
        keras.distribution.set_distribution(None)
        return devices, train()[0]

    assert run_ranks(program, 2, True) == run_ranks(program, 2, False)


def test_clear_session_drops_the_distribution_and_another_one_can_be_set():
    def program(rank):
        shardcore.install("dtensor")
        names, losses = [], []
        for _ in range(2):
            keras.distribution.set_distribution(keras.distribution.DataParallel())
            history, _ = train()
            names.append(keras.layers.Dense(1).name)
            losses.append(history["loss"])
            keras.utils.clear_session()
            assert keras.distribution.distribution() is None
            assert shardcore.status().mesh_shape is None
        return names, losses[0] == losses[1]

    assert run_ranks(program, 2) == [(["dense_2", "dense_2"], True)] * 2


# --- an environment that cannot -------------------------------------------------------------------


def test_before_keras_torch_is_chosen_and_said():
    program = (
        "import sys, shardcore\n"
        "assert not {'torch', 'keras'} & sys.modules.keys()\n"
        "shardcore.install()\n"
        "import keras; print(keras.backend.backend(), keras.distribution.list_devices())"
    )
    done = python(program, SHARDCORE_LOG="install")
    assert done.stdout == "torch ['cpu:0']\n", done.stderr
    assert done.stderr.splitlines() == [
        "[shardcore rank 0] KERAS_BACKEND was not set: Keras will run on torch",
        "[shardcore rank 0] strategy 'dtensor' chosen (not 'manual': 'dtensor' has precedence.; "
        "not 'single': 'dtensor' has precedence.)",
    ]


def test_without_dtensor_auto_takes_what_there_is_and_says_why():
    def program():
        sys.modules["torch.distributed.tensor"] = None
        os.environ["SHARDCORE_LOG"] = "info"
        sys.stderr = io.StringIO()
        with pytest.raises(
            StrategyError, match=r"'dtensor' cannot be used here: DTensor is not av"
        ):
            shardcore.install("dtensor")
        assert not shardcore.status().installed
        status = shardcore.install("auto")
        return status.strategy, status.passed_over["dtensor"], sys.stderr.getvalue()

    strategy, reason, log = in_one_process(program)
    assert strategy == "manual"
    assert reason.startswith("DTensor is not available: ")
    assert "Install a torch that has it" in reason
    assert log == (
        f"[shardcore rank 0] strategy 'manual' chosen (not 'dtensor': {reason}; "
        "not 'single': 'manual' has precedence.)\n"
    )


# A torch that was built without torch.distributed lacks these functions.
WITHOUT_DISTRIBUTED = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            sys.meta_path.remove(self)
            import torch._C
            del torch._C._c10d_init, torch._C._rpc_init, torch._C._dist_autograd_init

sys.meta_path.insert(0, Without())
import shardcore
status = shardcore.install()
import keras, numpy as np, torch
assert not torch.distributed.is_available()
mesh = keras.distribution.DeviceMesh((1, 1), ("data", "model"))
rules = keras.distribution.LayoutMap(mesh)
rules["hidden/kernel"] = (None, "model")
keras.distribution.set_distribution(
    keras.distribution.ModelParallel(layout_map=rules, batch_dim_name="data")
)
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="hidden")])
model.compile("adam", "mse")
x, y = np.ones((10, 4)), np.ones((10, 3))
model.fit(x, y, batch_size=4, epochs=4, verbose=0)
model.save_weights(sys.argv[1] + "/trained.weights.h5")
assert shardcore.verify(model, (x, y)).ok
assert not shardcore.explain(model, (x, y)).collectives
shardcore.uninstall()
print(status.strategy, *sorted(set(status.passed_over.values())))
"""


@pytest.mark.skipif(LINE >= (3, 16), reason="Keras 3.16 imports torch.distributed itself")
def test_a_torch_without_distributed_gives_single_and_the_reason(tmp_path):
    done = python(WITHOUT_DISTRIBUTED, str(tmp_path))
    reason = "This torch was built without torch.distributed: install one that has it."
    assert done.stdout == f"single {reason}\n", done.stderr
    assert f"strategy 'single' chosen (not 'dtensor': {reason}; not 'manual': " in done.stderr


# Keras 3.16 needs torch.distributed.tensor; older lines only their backend.
WITHOUT_A_MODULE = """
import os, sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ImportError(f"no module {name} here")

sys.meta_path.insert(0, Without())
import shardcore
try:
    shardcore.install()
except shardcore.ShardcoreError as error:
    print(type(error).__name__, error)
assert not shardcore.status().installed
assert "KERAS_BACKEND" not in os.environ
"""


def test_a_keras_that_cannot_be_imported_is_an_error_that_says_what_is_missing():
    name = "torch.distributed.tensor" if LINE >= (3, 16) else "keras.src.backend.torch"
    done = python(WITHOUT_A_MODULE, name)
    assert done.stdout.startswith("EnvironmentProblem Keras 3."), done.stderr
    assert f": no module {name} here. " in done.stdout
    assert "install one, or keras<3.16." in done.stdout


NEWER_TORCH = "import torch; torch.__version__ = '2.99.0'\n"


def test_a_newer_torch_that_fits_is_installed_with_one_warning():
    program = NEWER_TORCH + (
        "import shardcore; status = shardcore.install()\n"
        "print(status.strategy, status.versions['torch'])"
    )
    done = forked(program)
    assert done.stdout == "dtensor 2.99.0\n", done.stderr
    assert done.stderr == (
        "[shardcore rank 0] torch 2.99.0 is newer than 2.15, the newest tested release. The "
        "self-check found nothing that does not fit.\n"
    )
    assert forked(program, RANK="1").stderr == ""


NOT_FITTING = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, torch, shardcore
from keras.src.utils import io_utils
from tests.distributed.strategies.test_install import keras_names
import shardcore.binding.install

del torch._C._current_graph_task_id, io_utils.print_msg
before = keras_names()
try:
    shardcore.install()
except shardcore.domain.errors.EnvironmentProblem as error:
    print(error)
print(keras_names() == before, shardcore.status().installed)
"""


def test_names_that_a_newer_torch_lacks_are_named_and_nothing_is_patched():
    done = forked(NEWER_TORCH + NOT_FITTING)
    error, rest = done.stdout.splitlines()
    assert "does not fit: torch has no torch._C._current_graph_task_id; Keras has no " in error
    assert "keras.src.utils.io_utils:print_msg. Nothing was" in error
    assert rest == "True False"


def test_no_such_strategy_leaves_keras_alone():
    def program():
        before = keras_names()
        with pytest.raises(StrategyError, match="No strategy 'dtenser': there are 'dtensor', '"):
            shardcore.install("dtenser")
        return keras_names() == before, shardcore.status().installed

    assert in_one_process(program) == (True, False)


def test_a_function_that_needs_an_installation_says_so():
    with pytest.raises(EnvironmentProblem, match=r"call shardcore\.install\(\) first"):
        shardcore.mesh_info()


# --- the log --------------------------------------------------------------------------------------


def build_sharded():
    shardcore.install("dtensor")
    mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map))
    keras.layers.Dense(4, name="up").build((None, 3))


@pytest.mark.parametrize(
    ("words", "ranks"), [("debug", {0}), ("debug,all-ranks", {0, 1}), ("variables", {0})]
)
def test_the_log_traces_a_variable(words, ranks):
    def program(rank):
        os.environ["SHARDCORE_LOG"] = words
        sys.stderr = io.StringIO()
        build_sharded()
        return sys.stderr.getvalue().splitlines()

    for rank, lines in enumerate(run_ranks(program, 2)):
        if rank not in ranks:
            assert lines == []
            continue
        begin = f"[shardcore rank {rank}] "
        expected = [
            f"{begin}distribution set: ModelParallel over mesh (data=1, model=2)",
            f"{begin}variable up/kernel: shape (3, 4), rule '.*kernel', spec (None, 'model'), "
            "placements [R, S(1)], local shape (3, 2)",
            f"{begin}variable up/bias: shape (4,), rule None, spec (None,), "
            "placements [R, R], local shape (4,)",
        ]
        if "debug" in words:
            assert lines[0].startswith(f"{begin}strategy 'dtensor' chosen")
            assert lines[1:] == expected
        else:
            assert lines == expected[1:]


def test_the_logging_module_s_own_configuration_is_respected():
    def program(rank):
        os.environ.pop("SHARDCORE_LOG", None)
        sys.stderr = io.StringIO()
        own = io.StringIO()
        logging.getLogger().handlers[:] = []
        logging.basicConfig(stream=own, format="%(name)s %(levelname)s %(message)s", force=True)
        logging.getLogger("shardcore.variables").setLevel(logging.DEBUG)
        build_sharded()
        return own.getvalue(), sys.stderr.getvalue()

    for own, stderr in run_ranks(program, 2):
        assert "shardcore.variables DEBUG variable up/kernel: shape (3, 4)" in own
        assert "distribution set" not in own
        assert stderr == ""


def test_by_default_rank_0_logs_news_and_no_usual_start():
    def program(rank):
        logging.getLogger().handlers[:] = []
        os.environ.pop("SHARDCORE_LOG", None)
        sys.stderr = io.StringIO()
        build_sharded()
        before = sys.stderr.getvalue()
        logging.getLogger("shardcore.install").info("news")
        return before, sys.stderr.getvalue()

    assert run_ranks(program, 2, init=False) == [("", "[shardcore rank 0] news\n"), ("", "")]
