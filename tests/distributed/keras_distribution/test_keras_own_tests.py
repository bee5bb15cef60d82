"""The tests that Keras has for itself, under shardcore."""

from functools import partial

import pytest
from keras.src import backend

import shardcore
from shardcore import bootstrap
from shardcore.binding.keras_private.lines import LINE
from tests.keras_tests.running import KERAS, outcomes

DISTRIBUTION = "distribution/distribution_lib_test.py"
WITHOUT_TENSORFLOW = "not dataset or unsupported_dataset"
# Its test sets a distribution over eight devices, and shardcore refuses one that this job lacks.
OF_EIGHT_DEVICES = "DistributionTest::test_scope"

# The line of Keras that CI has.
TESTED = (3, 15)
# In Keras 3.13 a rule matches a part of a path. Under shardcore it matches the path, as since 3.14.
OF_PARTS_OF_PATHS = {"LayoutMapTest::test_get"} if LINE < (3, 14) else set()

pytestmark = pytest.mark.skipif(
    not (KERAS / "src" / DISTRIBUTION).exists(),
    reason="the wheel of this Keras has no tests: make compat adds them",
)


def install_for_tests_of_jax():
    shardcore.install()
    # They make variables of integers that are trainable, which torch refuses, in plain Keras too.
    backend.Variable = partial(backend.Variable, trainable=False)


def install_on_eight_ranks():
    shardcore.install()
    bootstrap.simulate(8)


def test_keras_tests_of_distributions_pass_that_it_skips_without_jax():
    found = outcomes(DISTRIBUTION, install_for_tests_of_jax, WITHOUT_TENSORFLOW)
    assert "has 8 devices, but the job has 1 processes" in found.pop(OF_EIGHT_DEVICES)
    failed = {name: outcome for name, outcome in found.items() if outcome != "passed"}
    assert failed.keys() == OF_PARTS_OF_PATHS, failed
    assert len(found) >= (31 if LINE == TESTED else 26)


def test_the_scope_of_a_distribution_over_eight_devices_passes_in_a_job_of_eight():
    name = OF_EIGHT_DEVICES.replace("::", " and ")
    assert outcomes(DISTRIBUTION, install_on_eight_ranks, name) == {OF_EIGHT_DEVICES: "passed"}


@pytest.mark.parametrize(
    ("file", "chosen", "fewest"),  # how many pass in Keras 3.15, and in 3.13
    [
        ("layers/layer_test.py", "", (59, 50)),
        ("optimizers/optimizer_test.py", "", (40, 39)),
        # Left out: what starts processes, which a rank of run_ranks may not; a large model; what
        # needs TensorFlow, grain or a file that no wheel has; and steps with "jit", eager here too.
        (
            "saving/saving_lib_test.py",
            "not concurrently and not efficientnet and not remote and not remove_weights_only"
            " and not legacy_load",
            (70, 51),
        ),
        (
            "trainers/trainer_test.py",
            "not multiprocessing and (non_jit or not _jit) and not tf_dataset and not grain"
            " and not predict_preserve_order",
            (76, 72),
        ),
    ],
    ids=["layers", "optimizers", "saving", "trainers"],
)
def test_the_same_tests_of_keras_pass_as_without_shardcore(file, chosen, fewest):
    under = outcomes(file, shardcore.install, chosen)
    passed = {name for name, outcome in under.items() if outcome == "passed"}
    assert len(passed) >= fewest[LINE != TESTED]
    failed = {name for name, outcome in under.items() if outcome.startswith("failed")}
    if failed:
        only = " or ".join(name.replace("::", " and ") for name in failed)
        without = outcomes(file, lambda: None, only)
        assert [name for name in failed if without[name] == "passed"] == []
