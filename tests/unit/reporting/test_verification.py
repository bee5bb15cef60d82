import json

import pytest

from shardcore.reporting.inspection.verification import VariableCheck, Verification

KERNEL = {
    "path": "dense/kernel", "rule": ".*kernel", "spec": "(None, 'model')", "shape": (4, 8),
    "local_shape": (4, 4), "bytes_here": 64, "bytes_full": 128, "stored": True,
    "gradient": "(None, 'model')", "gradient_fits": True,
}  # fmt: skip


def report(**changes):
    check = VariableCheck(**{**KERNEL, **changes})
    return Verification("(data=1, model=2)", "dtensor", 0, (check,))


@pytest.mark.parametrize(
    ("changes", "ok", "shown"),
    [
        ({}, True, "all as it should be"),
        ({"gradient": None, "gradient_fits": None}, True, "as it should be, gradients not checked"),
        ({"stored": False}, False, "WRONG"),
        ({"gradient": "(None, None)", "gradient_fits": False}, False, "WRONG: (None,"),
        ({"stale": "rule 'x' was added"}, False, "WRONG: dense/kernel: rule 'x' was added"),
    ],
)
def test_the_verdict_is_in_the_data_and_in_the_table(changes, ok, shown):
    found = report(**changes)
    assert found.ok is ok
    assert found.to_dict()["ok"] is ok
    assert shown in " ".join(found.text(200).split())


def test_rules_that_matched_nothing_are_shown():
    check = VariableCheck(**KERNEL)
    found = Verification("(model=2)", "dtensor", 0, (check,), unused_rules=("typo",))
    assert "Rules that matched nothing: typo" in found.text(80)
    assert "matched nothing" not in str(report())


def test_bytes_are_summed():
    found = report()
    assert (found.bytes_here, found.bytes_full) == (64, 128)
    assert "64 B" in found.text(200)
    assert "128 B" in found.text(200)


def test_it_fits_80_columns_and_shows_what_is_wrong():
    path = "model/decoder/block_11/attention/output/kernel"
    found = report(path=path, stored=False, rule=".*attention/output/kernel", stale="x" * 100)
    shown = found.text(80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "WRONG" in shown
    assert path in shown.replace("\n", "")  # in full, in the note below the table
    assert "…" in shown
    assert "128 B" not in shown


def test_the_data_is_json():
    assert json.loads(json.dumps(report().to_dict()))["variables"][0]["path"] == "dense/kernel"
