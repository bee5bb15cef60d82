"""Places that hold state: objects, modules, closures, classes, defaults, threads.

The texts are parts of programs, as those of `kinds`. `make()` makes the state of a program.
"""

import attrs

from tests.distributed.capture.states.kinds import Kind


@attrs.frozen
class Holder:
    """A place for state.

    Args:
        name: Where it is, for people.
        read: The expression that reads it; `{0}` is the attribute access, if it has an `owner`.
        owner: The expression for the object whose attribute it is.
        put: The statement that puts `state` there.
        begun: The statement of `__init__` that puts it there first.
        module: Definitions of the module, after those of the kind.
        body: Statements of the class.
        is_wrapped: Whether Keras may wrap it.
        is_in_dict: Whether `vars(owner)` has it.
        is_class: Whether it is an attribute of a class that objects look up.
    """

    name: str
    put: str
    read: str = "{0}"
    owner: str = ""
    begun: str = "pass"
    module: str = ""
    body: str = "pass"
    is_wrapped: bool = False
    is_in_dict: bool = True
    is_class: bool = False

    def fits(self, kind: Kind) -> bool:
        """Whether it can hold a kind, which is neither wrapped nor made a method there."""
        is_other = self.is_wrapped and kind.is_wrapped
        return not is_other and not (self.is_class and kind.is_bound)


def of_owner(name, owner, begun="pass", **options):
    return Holder(name, f"{owner}.state = state", owner=owner, begun=begun, **options)


CLOSURE = """
def enclosed():
    state = make()
    def get():
        return state
    def put(other):
        nonlocal state
        state = other
    return get, put
"""
BOX = (
    "class Box:\n    pass\ndef box():\n    made = Box()\n    made.state = make()\n    return made\n"
)
OTHER = "settings = importlib.import_module(OTHER)"
ENCLOSED_MODULE = f"""{OTHER}
settings.state = make()
{CLOSURE.replace("make()", "settings")}
get, _ = enclosed()
del settings
"""
PART_OF_A_METHOD = """
class Part:
    def __init__(self):
        self.state = make()
    def get(self):
        return self.state
"""
PART_OF_A_PROPERTY = """
class Part:
    def __init__(self):
        self._state = make()
    @property
    def state(self):
        return self._state
"""
HOLDERS = (
    of_owner("an attribute", "self", "self.state = make()", is_wrapped=True),
    of_owner("an object", "self.box", "self.box = box()", module=BOX),
    of_owner("an object in a list", "self.boxes[0]", "self.boxes = [box()]", module=BOX),
    of_owner("an object in a dict", "self.boxes['a']", "self.boxes = {'a': box()}", module=BOX),
    of_owner("an object in a tuple", "self.boxes[1]", "self.boxes = (1, box())", module=BOX),
    of_owner(
        "an object of objects", "self.a.a", "self.a = box()\n        self.a.a = box()", module=BOX
    ),
    of_owner("a global object", "BOX", module=BOX + "BOX = box()"),
    Holder(
        "a list",
        "self.held[1] = state",
        "self.held[1]",
        begun="self.held = [0, make()]",
        is_wrapped=True,
    ),
    Holder(
        "a dict",
        "self.held['a'] = state",
        "self.held['a']",
        begun="self.held = {'a': make()}",
        is_wrapped=True,
    ),
    Holder(
        "a tuple",
        "self.held = (state,)",
        "self.held[0]",
        begun="self.held = (make(),)",
        is_wrapped=True,
    ),
    Holder("a global", "globals()['STATE'] = state", "STATE", module="STATE = make()"),
    Holder("a global list", "STATES[0] = state", "STATES[0]", module="STATES = [make()]"),
    Holder("a global dict", "STATES['a'] = state", "STATES['a']", module="STATES = {'a': make()}"),
    Holder(
        "a nested global dict",
        "STATES['a']['b'] = state",
        "STATES['a']['b']",
        module="STATES = {'a': {'b': make()}}",
    ),
    of_owner("another module", "settings", module=f"{OTHER}\nsettings.state = make()"),
    of_owner(
        "a module that is held",
        "self.module",
        f"self.module = {OTHER.partition(' = ')[2]}",
        module=f"{OTHER}\nsettings.state = make()\ndel settings",
    ),
    of_owner(
        "a module in a dict",
        "MODULES['a']",
        module=f"{OTHER}\nsettings.state = make()\nMODULES = {{'a': settings}}",
    ),
    of_owner(
        "a module in a closure",
        "get()",
        module=ENCLOSED_MODULE,
        is_in_dict=True,
    ),
    Holder("a closure", "put(state)", "get()", module=CLOSURE + "get, put = enclosed()"),
    Holder(
        "a closure that is held",
        "self.put(state)",
        "self.get()",
        begun="self.get, self.put = enclosed()",
        module=CLOSURE,
    ),
    Holder(
        "the class", "type(self).state = state", "self.state", body="state = make()", is_class=True
    ),
    Holder(
        "the class, hidden",
        "self.state = state",
        "self.state",
        body="state = make()",
        is_wrapped=True,
        is_class=True,
    ),
    Holder(
        "the base, hidden",
        "Held.state = state",
        "self.state",
        module="class Mixin:\n    state = make()",
        is_class=True,
    ),
    Holder(
        "a class that is held",
        "self.kind.state = state",
        "self.kind.state",
        begun="self.kind = Part",
        module="class Part:\n    state = make()",
    ),
    Holder(
        "a global class",
        "Part.state = state",
        "Part.state",
        module="class Part:\n    state = make()",
    ),
    Holder(
        "a default",
        "given.__defaults__ = (state,)",
        "given()",
        module="def given(state=make()):\n    return state",
    ),
    Holder(
        "a default of a keyword",
        "given.__kwdefaults__['state'] = state",
        "given()",
        module="def given(*, state=make()):\n    return state",
    ),
    of_owner("a function", "given", module="def given():\n    pass\ngiven.state = make()"),
    of_owner(
        "the thread",
        "LOCAL",
        module="LOCAL = threading.local()\nLOCAL.state = make()",
        is_in_dict=False,
    ),
    of_owner(
        "an object of Python's library",
        "self.text",
        "self.text = string.Template('')\n        self.text.state = make()",
    ),
    of_owner(
        "a slot",
        "self.slot",
        "self.slot = Slot()\n        self.slot.state = make()",
        module="class Slot:\n    __slots__ = 'state'",
        is_in_dict=False,
    ),
    Holder(
        "a partial function",
        "self.part = functools.partial(same, state)",
        "self.part()",
        begun="self.part = functools.partial(same, make())",
        module="def same(value):\n    return value",
    ),
    Holder(
        "a bound method",
        "self.get.__self__.state = state",
        "self.get()",
        begun="self.get = Part().get",
        module=PART_OF_A_METHOD,
    ),
    Holder(
        "a property",
        "self.part._state = state",
        "self.part.state",
        begun="self.part = Part()",
        module=PART_OF_A_PROPERTY,
    ),
    Holder(
        "a context variable",
        "HELD.set(state)",
        "HELD.get()",
        module="HELD = contextvars.ContextVar('held')\nHELD.set(make())",
    ),
    Holder(
        "a weak reference",
        "self.part.state = state",
        "self.weak().state",
        begun="self.part = box()\n        self.weak = weakref.ref(self.part)",
        module=BOX,
    ),
)
