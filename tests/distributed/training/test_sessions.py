"""Models, meshes and rules of several sessions in one process."""

import gc
import weakref

import keras

import shardcore
from shardcore import bootstrap
from shardcore.domain.errors import CallProblem
from shardcore.testing import run_ranks
from tests.distributed.programs import assert_fails_everywhere, distribute
from tests.distributed.regression import KERNEL, X, build, fit


def test_a_model_outside_its_scope_is_in_the_session_that_it_was_built_in():
    """Two distributions of one mesh: one takes the global batch, the other a rank's own rows."""

    def program(rank):
        shardcore.install("dtensor")
        whole, own = (
            keras.distribution.DataParallel(
                keras.distribution.DeviceMesh((2,), ("data",)), auto_shard_dataset=auto
            )
            for auto in (True, False)
        )
        shapes = []
        for other, distribution in [(own, whole), (whole, own)]:
            with other.scope():
                build()
            with distribution.scope():
                model = build()
            shapes.append(model.predict(X, verbose=0).shape)
        return shapes

    assert run_ranks(program, 2) == [[(16, 1), (32, 1)]] * 2


def test_a_model_of_another_mesh_is_named():
    def program(rank):
        with distribute((2, 1), KERNEL).scope():
            model = build()
        with distribute((1, 2), KERNEL).scope():
            fit(model)

    assert_fails_everywhere(
        program, 2, error=CallProblem,
        match=r"hidden/kernel.*over mesh \(data=2, model=1\).*set is over mesh \(data=1, model=2\)",
    )  # fmt: skip


def test_a_distribution_is_freed_with_its_models():
    def program(rank):
        def use():
            distribution = distribute((2, 1))
            model = build()
            fit(model, epochs=1)
            keras.distribution.set_distribution(None)
            return weakref.ref(distribution), weakref.ref(model)

        refs = [use(), use()]
        keras.utils.clear_session()
        gc.collect()
        sessions = bootstrap.installation().binding.sessions
        return [ref() is None for pair in refs for ref in pair], len(sessions._alive)

    assert run_ranks(program, 2) == [([True] * 4, 0)] * 2


def test_a_rule_that_came_after_the_variable_decided_nothing_and_verify_says_so():
    def program(rank):
        distribution = distribute((1, 2), {".*head/kernel": ("model", None)})
        model = build()
        before = shardcore.verify(model)
        distribution._layout_map[".*hidden/kernel"] = (None, "model")
        late = shardcore.verify(model)
        report = shardcore.rules_report(model)
        kernel = model.get_layer("hidden").kernel
        shardcore.distribute_variable(kernel)
        after = shardcore.verify(model)
        del distribution._layout_map[".*head/kernel"]
        gone = shardcore.verify(model)
        checks = [{c.path: (c.rule, c.stale) for c in v.variables} for v in (late, after, gone)]
        return [v.ok for v in (before, late, after, gone)], checks, report, str(late)

    for ok, (late, after, gone), report, shown in run_ranks(program, 2):
        assert ok == [True, False, True, False]
        rule, stale = late["sequential/hidden/kernel"]
        assert rule is None
        assert stale.startswith("rule '.*hidden/kernel' was added after the variable was built: it")
        assert "was added after the variable was built" in " ".join(shown.split())
        assert late["sequential/head/kernel"] == (".*head/kernel", None)
        assert after["sequential/hidden/kernel"] == (".*hidden/kernel", None)
        assert "rule '.*head/kernel' was taken away" in gone["sequential/head/kernel"][1]
        assert report.matched == {"sequential/head/kernel": ".*head/kernel"}
        assert report.unused_rules == (".*hidden/kernel",)
        assert "came after the variables were built" in report.hints[".*hidden/kernel"]
        assert "sequential/hidden/kernel" in report.unmatched_paths
