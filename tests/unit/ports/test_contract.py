"""A strategy that breaks the contract is named, with its package, as soon as it can be."""

from types import SimpleNamespace

import attrs
import pytest

from shardcore.domain.errors import MeshError, StrategyError
from shardcore.domain.layout import Layout
from shardcore.domain.mesh import Mesh
from shardcore.ports import contract
from shardcore.ports.strategy import NewVariable, StrategyEntry
from shardcore.ports.world import World
from shardcore.strategies.single_device import SingleDeviceStrategy

WORLD = World(Mesh((1,), ("data",)), (0,), 0, "cpu")
WHO = r"^Strategy 'mine' of package 'a-package' "


def entry(open_):
    return StrategyEntry("mine", "An example.", open_, package="a-package")


def test_every_method_of_the_port_is_looked_for():
    assert {"storage", "create", "full_tensor", "scope"} < set(contract.METHODS)
    strategy = contract.opened(entry(SingleDeviceStrategy), WORLD)
    assert isinstance(strategy, SingleDeviceStrategy)
    for name in contract.METHODS:
        lacks = type("Lacks", (), {m: getattr(strategy, m) for m in contract.METHODS if m != name})
        with pytest.raises(StrategyError, match=WHO + rf"breaks .*: Lacks has no method {name}\("):
            contract.opened(entry(lambda world, lacks=lacks: lacks()), WORLD)


@pytest.mark.parametrize(
    ("name", "method", "found"),
    [
        ("create", lambda self, value: value, r"has create\(value\), expected create\(value, stor"),
        ("track", lambda self, a, b, c: None, r"has track\(a, b, c\), expected track\(stored, st"),
        ("scope", lambda self: None, r"has scope\(\), expected scope\(visiting=False\): "),
        ("full_tensor", "not a method", r"has no method full_tensor\(tensor\)"),
    ],
)
def test_a_method_with_another_signature_is_refused(name, method, found):
    odd = type("Odd", (SingleDeviceStrategy,), {name: method})
    with pytest.raises(StrategyError, match=WHO + rf"breaks the contract .*: Odd {found}"):
        contract.opened(entry(odd), WORLD)


def test_a_compatible_method_may_rename_and_add_arguments():
    more = {"create": lambda self, v, s, *others: v, "scope": lambda self, **options: None}
    contract.opened(entry(type("More", (SingleDeviceStrategy,), more)), WORLD)


def test_an_error_of_opening_names_the_package():
    def fails(world):
        raise OSError("no driver")

    with pytest.raises(StrategyError, match=WHO + r"could .* mesh \(data=1\): OSError: no driver$"):
        contract.opened(entry(fails), WORLD)


def test_an_error_of_ours_is_left_as_it_is():
    def refuses(world):
        raise MeshError("the mesh is too small")

    with pytest.raises(MeshError, match=r"^the mesh is too small$"):
        contract.opened(entry(refuses), WORLD)


MESH = Mesh((2,), ("data",))
VARIABLE = NewVariable("a/kernel", (4, 2), Layout(MESH, (None, None)), "data", of_optimizer=False)


def test_a_storage_layout_that_fits_is_taken():
    storage = Layout(MESH, ("data", None))
    assert contract.check_storage(entry(None), VARIABLE, storage) is storage


@pytest.mark.parametrize(
    "storage",
    [
        None,
        ("data", None),
        Layout(MESH, ("data",)),
        Layout(Mesh((2,), ("model",)), (None, None)),
        Layout(MESH, (None, None), {"data": "sum"}),
    ],
)
def test_a_storage_layout_that_does_not_fit_is_refused(storage):
    with pytest.raises(
        StrategyError, match=WHO + r"wants to keep variable 'a/kernel' of shape \(4, 2\) as "
    ):
        contract.check_storage(entry(None), VARIABLE, storage)


@attrs.frozen
class Value:
    shape: tuple
    part: tuple


def check(created):
    def local(value):
        return SimpleNamespace(shape=value.part)

    contract.check_created(entry(None), "a/kernel", created, (4, 2), local, (2, 2))


def test_a_created_value_must_have_its_global_and_local_shape():
    check(Value((4, 2), (2, 2)))
    with pytest.raises(StrategyError, match=WHO + r"made a value of shape \(2, 2\) for variable"):
        check(Value((2, 2), (2, 2)))
    with pytest.raises(StrategyError, match=WHO + r"made a value of shape none, of type NoneType"):
        check(None)
    with pytest.raises(StrategyError, match=WHO + r"stores a part of shape \(4, 2\) of variable"):
        check(Value((4, 2), (4, 2)))
