"""Every public Keras class trains to the numbers of one device.

A few cases of each table on one mesh; `make matrix-full` runs every case on every mesh.
"""

import pytest

from tests.matrix import suite
from tests.matrix.cases.layers import NOT_ON_ONE_DEVICE, RUN_BY_OTHER_RELEASES
from tests.matrix.outcomes import class_of
from tests.matrix.parity import over_mesh
from tests.matrix.suite import CLASSES


@pytest.mark.parametrize("name", [name for name in CLASSES if CLASSES[name].module])
def test_every_public_class_has_a_case(name):
    table = CLASSES[name]
    covered = {class_of(case.name) for case in table.cases}
    assert [sorted(names) for names in table.public() if not names & covered] == []
    assert covered <= set().union(*table.public())


@pytest.mark.parametrize("name", CLASSES)
def test_no_two_cases_have_one_name(name):
    names = [case.name for case in CLASSES[name].cases]
    assert len(names) == len(set(names))
    assert set(CLASSES[name].fast) <= set(names)


def test_cases_listed_as_not_running_on_one_device_do_not_run_or_are_right():
    listed = [case for case in CLASSES["layers"].cases if case.name in NOT_ON_ONE_DEVICE]
    assert {case.name for case in listed} == set(NOT_ON_ONE_DEVICE)
    numbers = CLASSES["layers"].reference(listed)
    run = [case for case in listed if not isinstance(numbers[case.name], str)]
    assert {case.name for case in run} <= RUN_BY_OTHER_RELEASES
    by_name = {mesh.name: mesh for mesh in suite.ALL}
    found = over_mesh(run, by_name[suite.FAST_MESH], numbers)
    assert suite.unexpected(found) == {}


@pytest.mark.parametrize("name", CLASSES)
def test_the_numbers_are_those_of_one_device(name):
    table = CLASSES[name]
    outcomes = table.run(suite.fast_mesh(name), table.fast)
    assert set(outcomes) == set(table.fast), "not all of them run on one device"
    assert suite.unexpected(outcomes) == {}
