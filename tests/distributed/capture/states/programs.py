"""Programs that read a number from Python state: where it is held, how it is reached, how changed.

A program is the text of a module. It is joined from a kind of state, a holder, the way from a layer
or a loss to the holder, and a change.
"""

import random
import textwrap

import attrs

from tests.distributed.capture.states.holders import HOLDERS, Holder
from tests.distributed.capture.states.kinds import KINDS, Kind
from tests.distributed.capture.states.surroundings import SURROUNDINGS, Surrounding
from tests.distributed.capture.states.ways import ACCESSES, REACHES, ROLES

IMPORTS = """
import abc, argparse, array, attrs, builtins, collections, configparser, contextlib, contextvars
import copy, ctypes, dataclasses, datetime, decimal, email.message, enum, fractions, functools, glob
import heapq, importlib, io, json, linecache, logging, math, operator, os, pathlib, queue, random
import re, string, sys, threading, time, types, typing, warnings, weakref
from unittest import mock
import keras, torch
import numpy as np
from keras import ops
"""


WEIGHTS = {"layer": 6, "model": 2, "loss": 2, "regularizer": 1, "schedule": 1}
PLACES = {"file": 9, "cell": 1}

PROGRAM = """{imports}
{before}
{make}
{module}
{helpers}
class Held({bases}):
{body}
    def __init__(self):
        super().__init__()
        {init}
        {begun}
{methods}

def build():
    keras.utils.set_random_seed(0)
    {build}
    model.compile(keras.optimizers.SGD({rate}), {loss})
    return held, model

def change(self):
    {change}

def undo():
    {undo}
"""


@attrs.frozen
class Case:
    """A program and what it is about."""

    kind: str
    labels: tuple[str, ...]
    source: str
    place: str = "file"

    @property
    def name(self):
        return ", ".join((self.kind, *self.labels))


def indented(text, by="    "):
    return textwrap.indent(text, by)


def joined(role, reach, number, *, change, undo="pass", before="", make="", holder=None):
    """Returns the text of a program that multiplies by a `number`."""
    base, reads, init, build, loss, rate = ROLES[role]
    expression, helpers, method = (text.format(number) for text in REACHES[reach])
    inner = (
        f"def reach():\n        return {number}" if reach == "in a function of a function" else ""
    )
    has_mixin = "class Mixin" in before + (holder.module if holder else "")
    mixins = ["Reach"] * ("class Reach" in helpers) + ["Mixin"] * has_mixin
    return PROGRAM.format(
        imports=IMPORTS,
        before=before,
        make=make,
        module=holder.module if holder else "",
        helpers=helpers,
        bases=", ".join([*mixins, base]),
        body=indented(holder.body if holder else "pass"),
        init=init,
        begun=holder.begun if holder else "pass",
        methods=indented("\n".join([method, reads.format(f"({expression})", inner or "pass")])),
        build=build,
        loss=loss,
        rate=rate,
        change=change,
        undo=undo,
    )


def place_of(read: str, draw: random.Random) -> str:
    """Returns whether the program is a file, or cells, which have no module of this name."""
    place = draw.choices(list(PLACES), list(PLACES.values()))[0]
    return "file" if "__name__" in read else place


def of_state(kind: Kind, holder: Holder, draw: random.Random, *, is_replaced: bool) -> Case:
    """Returns a program whose state is held by an object, a module, a function."""
    role = draw.choices(list(ROLES), [WEIGHTS[name] for name in ROLES])[0]
    access = "by a dot"
    if holder.owner:
        dicts = ("by vars", "by __dict__", "by object")
        access = draw.choice([key for key in ACCESSES if holder.is_in_dict or key not in dicts])
    state = holder.read.format(ACCESSES[access].format(holder.owner))
    reach = draw.choice(list(REACHES))
    made = f"state = {kind.other or 'make()'}"
    how = "another one" if is_replaced else "in place"
    if is_replaced:
        change = "\n    ".join([made, *([] if kind.other else [kind.changed]), holder.put])
    else:
        change = f"state = {state}\n    {kind.changed}"
    place = place_of(kind.read, draw)
    source = joined(
        role,
        reach,
        kind.read.format(f"({state})"),
        change=change,
        before=kind.before,
        make=f"def make():\n    return {kind.made}",
        holder=holder,
    )
    return Case(kind.name, (how, holder.name, access, reach, role, place), source, place)


def of_surrounding(surrounding: Surrounding, draw: random.Random) -> Case:
    """Returns a program that asks for something that it does not hold."""
    roles = ["layer", "model", "loss"] if surrounding.of_self else list(ROLES)
    role = draw.choices(roles, [WEIGHTS[name] for name in roles])[0]
    reach = draw.choice(list(REACHES))
    place = place_of(surrounding.read, draw)
    source = joined(
        role,
        reach,
        surrounding.read,
        change=surrounding.changed,
        undo=surrounding.undone,
        before=surrounding.before,
    )
    return Case(surrounding.name, (reach, role, place), source, place)


def drawn(seed: int) -> list[Case]:
    """Returns programs that the seed draws: one for each kind of state, holder and surrounding."""
    cases = []
    for kind in KINDS:
        draw = random.Random(f"{seed} {kind.name}")
        holder = draw.choice([place for place in HOLDERS if place.fits(kind)])
        is_replaced = not kind.changed or draw.random() < 0.2
        cases.append(of_state(kind, holder, draw, is_replaced=is_replaced))
    for holder in HOLDERS:
        draw = random.Random(f"{seed} {holder.name}")
        kind = draw.choice([kind for kind in KINDS if holder.fits(kind)])
        cases.append(of_state(kind, holder, draw, is_replaced=True))
    draws = {each: random.Random(f"{seed} {each.name}") for each in SURROUNDINGS}
    return cases + [of_surrounding(surrounding, draw) for surrounding, draw in draws.items()]
