"""A strategy that breaks the contract is named, with its package, as soon as it can be."""

from types import SimpleNamespace

import attrs
import pytest

from shardcore.domain.errors import MeshError, StrategyError
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.ports import contract
from shardcore.ports.strategy import NewVariable, StrategyEntry
from shardcore.ports.world import World
from shardcore.strategies.single_device import SingleDeviceStrategy

WORLD = World(Mesh((1,), ("data",)), (0,), 0, "cpu")
WHO = r"^Strategy 'mine' of package 'a-package' "


def entry(open_):
    return StrategyEntry("mine", "An example.", open_, package="a-package")


def test_every_method_of_the_port_is_looked_for():
    assert {"storage", "create", "full_tensor", "implicit_replication"} < set(contract.METHODS)
    strategy = contract.open_strategy(entry(SingleDeviceStrategy), WORLD)
    assert isinstance(strategy, SingleDeviceStrategy)
    for name in contract.METHODS:
        lacks = type("Lacks", (), {m: getattr(strategy, m) for m in contract.METHODS if m != name})
        with pytest.raises(StrategyError, match=WHO + rf"breaks .*: Lacks has no method {name}\("):
            contract.open_strategy(entry(lambda world, lacks=lacks: lacks()), WORLD)


@pytest.mark.parametrize(
    ("name", "method", "found"),
    [
        ("create", lambda self, value: value, r"has create\(value\), expected create\(value, stor"),
        ("redistribute", lambda self, a, b, c: None, r"has redistribute\(a, b, c\), expected redi"),
        (
            "implicit_replication",
            lambda self: None,
            r"has implicit_replication\(\), .* implicit_replication\(forbid_collectives=False\): ",
        ),
        ("full_tensor", "not a method", r"has no method full_tensor\(tensor\)"),
    ],
)
def test_a_method_with_another_signature_is_refused(name, method, found):
    odd = type("Odd", (SingleDeviceStrategy,), {name: method})
    with pytest.raises(StrategyError, match=WHO + rf"breaks the contract .*: Odd {found}"):
        contract.open_strategy(entry(odd), WORLD)


def test_a_compatible_method_may_rename_and_add_arguments():
    more = {
        "create": lambda self, v, s, *others: v,
        "implicit_replication": lambda self, **options: None,
    }
    contract.open_strategy(entry(type("More", (SingleDeviceStrategy,), more)), WORLD)


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_an_error_of_opening_names_the_package(error):
    def fails(world):
        raise error("no driver")

    kind = error.__name__
    said = rf"^Strategy .* 'a-package': open\(\) on mesh \(data=1\): {kind}: no driver$"
    with pytest.raises(StrategyError, match=said):
        contract.open_strategy(entry(fails), WORLD)


def test_an_error_of_ours_is_left_as_it_is():
    def refuses(world):
        raise MeshError("the mesh is too small")

    with pytest.raises(MeshError, match=r"^the mesh is too small$"):
        contract.open_strategy(entry(refuses), WORLD)


MESH = Mesh((2,), ("data",))
VARIABLE = NewVariable(
    "a/kernel", (4, 2), Layout(MESH, (None, None)), ("data",), of_optimizer=False
)


@attrs.frozen
class Answers:
    """A strategy that gives these answers; an error is raised."""

    answer: object
    part: tuple = (2, 2)

    def _answer(self, *arguments):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    storage = create = from_local = _answer

    def to_local(self, tensor):
        return SimpleNamespace(shape=self.part)


def storage(answer):
    return contract.storage_layout(entry(print), Answers(answer), VARIABLE)


def test_a_storage_layout_that_fits_is_taken():
    layout = Layout(MESH, ("data", None))
    assert storage(layout) is layout


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ("data", None),
        Layout(MESH, ("data",)),
        Layout(Mesh((2,), ("model",)), (None, None)),
        Layout(MESH, (None, None), {"data": "sum"}),
    ],
)
def test_a_storage_layout_that_does_not_fit_is_refused(answer):
    with pytest.raises(
        StrategyError, match=WHO + r"wants to keep variable 'a/kernel' of shape \(4, 2\) as "
    ):
        storage(answer)


def tensor(*shape):
    return SimpleNamespace(shape=shape)


def create(answer, part=(2, 2)):
    layout = Layout(MESH, ("data", None))
    return contract.create_tensor(
        entry(print), Answers(answer, part), tensor(), layout, VARIABLE, 0
    )


def test_a_created_value_must_have_its_global_and_local_shape():
    assert create(tensor(4, 2)).shape == (4, 2)
    with pytest.raises(StrategyError, match=WHO + r"made a value of shape \(2, 2\) for variable"):
        create(tensor(2, 2))
    with pytest.raises(StrategyError, match=WHO + r"made a value of shape none, of type NoneType"):
        create(None)
    with pytest.raises(StrategyError, match=WHO + r"stores a part of shape \(4, 2\) of variable"):
        create(tensor(4, 2), part=(4, 2))


def from_local(answer):
    layout = Layout(MESH, ("data", None))
    return contract.join_parts(entry(print), Answers(answer), tensor(2, 2), layout, (4, 2))


def test_joined_parts_must_have_the_global_shape():
    assert from_local(tensor(4, 2)).shape == (4, 2)
    with pytest.raises(StrategyError, match=WHO + r"joined parts to a value of shape \(2, 2\): "):
        from_local(tensor(2, 2))
    with pytest.raises(
        StrategyError, match=WHO + r"joined .* shape none, of type str,: from_local\(\)"
    ):
        from_local("garbage")


@pytest.mark.parametrize(
    ("call", "what"), [(storage, "storage"), (create, "create"), (from_local, "from_local")]
)
def test_an_error_of_a_method_names_package_and_method(call, what):
    who = r"^Strategy 'mine' of package 'a-package': "
    with pytest.raises(StrategyError, match=who + rf"{what}.*\(\) of .*: KeyError: 'lost'$"):
        call(KeyError("lost"))
