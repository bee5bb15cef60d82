"""Every public Keras class trains to the numbers of one device.

`SHARDCORE_MATRIX=full python -m pytest tests/matrix` runs every case on every mesh, which takes
about an hour on two cores; without it a few cases of each kind run on one mesh.
"""

import pytest

from tests.matrix import layers_tables as tables
from tests.matrix.layers_tables import TABLES


@pytest.mark.parametrize("name", [name for name in TABLES if TABLES[name].module])
def test_every_public_class_has_a_case(name):
    table = TABLES[name]
    covered = {tables.class_of(case) for case in table.cases}
    public = tables.public_classes(table)
    assert [sorted(names) for names in public if not names & covered] == []
    assert covered <= set().union(*public)


@pytest.mark.parametrize("name", TABLES)
def test_no_two_cases_have_one_name(name):
    names = [case.name for case in TABLES[name].cases]
    assert len(names) == len(set(names))
    assert set(TABLES[name].fast) <= set(names)


@pytest.mark.parametrize("name", TABLES)
def test_what_is_listed_as_not_running_on_one_device_does_not(name):
    table = TABLES[name]
    listed = tables.not_on_one_device(table.cases)
    chosen = [case for case in table.cases if case.name in listed]
    errors = tables.one_device(chosen) if chosen else {}
    errors |= {n: v for n, v in tables.reference(name).items() if isinstance(v, str)}
    assert {n: v for n, v in errors.items() if n not in listed} == {}
    assert all(isinstance(errors[n], str) for n in listed)


@pytest.mark.parametrize("mesh", tables.meshes(), ids=lambda mesh: mesh.name)
@pytest.mark.parametrize("name", TABLES)
def test_the_numbers_are_those_of_one_device(name, mesh):
    outcomes = tables.outcomes(name, mesh)
    assert outcomes
    assert tables.unexpected(outcomes) == {}


def test_every_documented_error_happens():
    found = {
        name
        for table in TABLES
        for mesh in tables.meshes()
        for name, outcome in tables.outcomes(table, mesh).items()
        if outcome.status == "error"
    }
    assert set(tables.DOCUMENTED_ERRORS) <= found
