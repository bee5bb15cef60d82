"""install() in environments that lack something, or have a newer release."""

import io
import os
import subprocess
import sys

import pytest

import shardcore
from shardcore.binding.keras_private.lines import LINE
from shardcore.domain.errors import EnvironmentProblem, StrategyError
from tests import warm
from tests.distributed.strategies.keras_names import in_one_process, keras_names


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
    job = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    assert forked(program, **job, MASTER_PORT="1").stderr == ""


NOT_FITTING = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, torch, shardcore
from keras.src.utils import io_utils
from tests.distributed.strategies.keras_names import keras_names
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
