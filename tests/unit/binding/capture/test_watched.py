"""Watched values are unchanged exactly as long as Python has the objects that it had."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcore.adapters.torch_private import DICT_VERSION, METADATA_OF
from shardcore.binding.capture.python_state.watched import WatchedValues

VALUES = (1, True, 1.0, "a", (1,), None)  # some are equal, and none is another
KEYS = ("a", "b", "c", 1, True, 1.0)


class Holder:
    """An object of the user, whose attributes are also read."""


def set_attribute(holder, entries, members, key, value):
    setattr(holder, str(key), value)


def set_attribute_often(holder, entries, members, key, value):
    for _ in range(100):  # so that Python specialises the instruction
        holder.a = value


def delete_attribute(holder, entries, members, key, value):
    vars(holder).pop(str(key), None)


def set_entry(holder, entries, members, key, value):
    entries[key] = value


def pop_and_set_entry(holder, entries, members, key, value):
    entries.pop(key, None)
    entries[key] = value


def refill(holder, entries, members, key, value):
    then = dict(entries)
    entries.clear()
    entries.update(then)


def merge(holder, entries, members, key, value):
    entries |= {key: value}


def set_member(holder, entries, members, key, value):
    members[0] = value


def append(holder, entries, members, key, value):
    members.append(value)


def drop_the_last(holder, entries, members, key, value):
    if len(members) > 1:
        members.pop()


CHANGES = (
    set_attribute,
    set_attribute_often,
    delete_attribute,
    set_entry,
    pop_and_set_entry,
    refill,
    merge,
    set_member,
    append,
    drop_the_last,
)


def things():
    """Makes an object, a dict and a list."""
    holder = Holder()
    holder.a, holder.b = VALUES[:2]
    return holder, {"a": 1, "b": None, 1: "a"}, [1, "a"]


def watched_values(holder, entries, members):
    """Watches attribute `a`, the number of attributes, the dict and the list."""
    watched = WatchedValues(METADATA_OF, DICT_VERSION)
    watched.add_attributes(vars(holder), ("a",), "holder")
    watched.add_size(vars(holder), "attributes of holder")
    watched.add_container(entries, "entries")
    watched.add_container(members, "members")
    watched.seal()
    return watched


def seen(holder, entries, members):
    """Lists what of them is watched, by identity."""
    attribute = vars(holder).get("a", holder)
    objects = [attribute, *entries.keys(), *entries.values(), *members]
    return [len(vars(holder)), len(entries), len(members), *map(id, objects)]


@given(
    st.lists(
        st.tuples(st.sampled_from(CHANGES), st.sampled_from(KEYS), st.sampled_from(VALUES)),
        max_size=8,
    )
)
def test_unchanged_is_what_has_the_objects_that_it_had(changes):
    held = things()
    watched, then = watched_values(*held), seen(*held)
    for change, key, value in changes:
        change(*held, key, value)
        assert watched.is_unchanged() == (seen(*held) == then), change.__name__


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_and_changed_back_is_unchanged(change):
    held = things()
    holder, entries, members = held
    watched = watched_values(*held)
    then = copy.copy(vars(holder)), dict(entries), list(members)
    change(*held, "a", (2,))
    vars(holder).clear()
    vars(holder).update(then[0])
    entries.clear()
    entries.update(then[1])
    members[:] = then[2]
    assert watched.is_unchanged()
    set_entry(*held, "a", (2,))
    assert not watched.is_unchanged()
    assert [change.name for change in watched.changes()] == ["entries"]
