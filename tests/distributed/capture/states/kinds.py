"""Kinds of Python state: how each is made, read as a number, and changed.

The texts are parts of programs: `programs` joins them. A program reads 1.0 before the change.
"""

import attrs


@attrs.frozen
class Kind:
    """A kind of state.

    Args:
        name: What it is and how it changes, for people.
        made: The expression that makes it.
        read: The expression that reads a number from it, which is `{0}`.
        changed: The statement that changes `state` in place; empty if only another one differs.
        other: The expression for another one, which replaces it; else one is made and changed.
        before: Definitions at the beginning of the module.
        is_wrapped: Whether Keras wraps it or makes it a weight where a layer holds it directly.
        is_bound: Whether it is a method where a class holds it.
    """

    name: str
    made: str
    read: str
    changed: str = ""
    other: str = ""
    before: str = ""
    is_wrapped: bool = False
    is_bound: bool = False


def slots(declared, attribute):
    begun = f"def __init__(self):\n        {attribute} = 1.0"
    return f"class Slots:\n    __slots__ = {declared}\n    {begun}"


RATE = "{0}.rate"
SET_RATE = "state.rate = 2.0"
DEFAULT = "getattr({0}, 'power', 1.0)"
ADD = "state.power = 2.0"
OPTIONS = "class Options:\n    rate = 1.0\n    def __init__(self):\n        self.rate = 1.0"
EMPTY = "class Options:\n    pass"
TRY = """
class Options:
    def read(self):
        try:
            return self.power
        except AttributeError:
            return 1.0
"""
FALLBACK = "class Options:\n    def __getattr__(self, name):\n        return 1.0"
SUBCLASS = "class Base:\n    rate = 1.0\nclass Options(Base):\n    pass"
DATACLASS = "@dataclasses.dataclass\nclass Options:\n    rate: float = 1.0\n    more: tuple = ()"
FROZEN = "@dataclasses.dataclass(frozen=True)\nclass Options:\n    rate: float = 1.0"
ATTRS = "@attrs.define\nclass Options:\n    rate: float = 1.0"
NAMED = "class Options(typing.NamedTuple):\n    rate: float\n    table: object"
OWN_DICT = "class Options(dict):\n    rate = 1.0"
OWN_LIST = "class Options(list):\n    rate = 1.0"
OWN_FLOAT = "class Options(float):\n    rate = 1.0"
OWN_ARRAY = "class Options(np.ndarray):\n    rate = 1.0"
MISSING = "class Options(dict):\n    def __missing__(self, key):\n        return 1.0"
SHADOWED = "class Options(dict):\n    def __getitem__(self, key):\n        return self.kept[key]"
ENUM = "class Mode(enum.Enum):\n    ONE = [1.0]\n    TWO = [2.0]"
PICK = "def pick(table, rate=1.0):\n    return rate * table[0]"
TWO = "def one():\n    return 1.0\ndef two():\n    return 2.0"
CLASSES = """
class One:
    def rate(self):
        return 1.0
class Two(One):
    def rate(self):
        return 2.0
"""
CELL = "CELL = {'RATE': 1.0}\nexec('def cell():\\n    return RATE', CELL)"
CACHED = """
RATES = [1.0]
@functools.lru_cache
def cached(name):
    return RATES[0]
"""
CACHED_PART = """
class Options:
    rate = 1.0
    @functools.cached_property
    def scale(self):
        return self.rate
"""
TARGET = "class Options:\n    rate = 1.0\nTARGET = Options()"
DEEP = "types.SimpleNamespace(a={'b': [types.SimpleNamespace(c={'d': [1.0]})]})"
SEVEN = "[[[[[[[1.0]]]]]]]"
SECOND = "float({0}[1])"
SET_SECOND = "state[1] = 2"
PARSER = """
def parser():
    parsed = configparser.ConfigParser()
    parsed.read_string('[a]\\nrate = 1.0')
    return parsed
"""

PLAIN = (
    Kind("a number", "1.0", "{0}", other="2.0"),
    Kind("a whole number", "1", "float({0})", other="2"),
    Kind("a string", "'a'", "float(len({0}))", other="'ab'"),
    Kind("bytes", "b'a'", "float(len({0}))", other="b'ab'"),
    Kind("a flag", "False", "2.0 if {0} else 1.0", other="True"),
    Kind("None", "None", "1.0 if {0} is None else 2.0", other="3"),
    Kind("a range", "range(1)", "float(len({0}))", other="range(2)"),
    Kind("a slice", "slice(0, 1)", "float({0}.stop)", other="slice(0, 2)"),
    Kind("a complex number", "1j", "{0}.imag", other="2j"),
    Kind("a fraction", "fractions.Fraction(1)", "float({0})", other="fractions.Fraction(2)"),
    Kind("a decimal", "decimal.Decimal(1)", "float({0})", other="decimal.Decimal(2)"),
    Kind("a frozenset", "frozenset([1])", "float(len({0}))", other="frozenset([1, 2])"),
    Kind("a path", "pathlib.Path('a')", "float(len({0}.name))", other="pathlib.Path('ab')"),
    Kind("a type", "int", "1.0 if {0} is int else 2.0", other="str"),
    Kind("a pattern", "re.compile('a')", "float(len({0}.pattern))", other="re.compile('ab')"),
)

CONTAINERS = (
    Kind("a list, set", "[1.0, 1.0]", SECOND, SET_SECOND),
    Kind("a list, appended", "[1.0]", "float(len({0}))", "state.append(1.0)"),
    Kind("a list, reversed", "[1.0, 2.0]", "{0}[0]", "state.reverse()"),
    Kind("a dict, set", "{'rate': 1.0}", "{0}['rate']", "state['rate'] = 2.0"),
    Kind("a dict, added", "{'a': 1}", "{0}.get('power', 1.0)", "state['power'] = 2.0"),
    Kind("a dict, asked", "{'a': 1}", "2.0 if 'b' in {0} else 1.0", "state['b'] = 2.0"),
    Kind("a dict, deleted", "{'rate': 1.0}", "{0}.get('rate', 2.0)", "del state['rate']"),
    Kind("a dict, renamed", "{'a': 1}", "{0}.get('b', 0) + 1.0", "state['b'] = state.pop('a')"),
    Kind(
        "a dict, reordered",
        "{'a': 1.0, 'b': 2.0}",
        "next(iter({0}.values()))",
        "state['a'] = state.pop('a')",
    ),
    Kind("a set", "{1}", "float(len({0}))", "state.add(2)"),
    Kind("a deque", "collections.deque([1.0, 1.0])", SECOND, SET_SECOND),
    Kind("a counter", "collections.Counter('a')", "float({0}['a'])", "state.update('a')"),
    Kind("an OrderedDict", "collections.OrderedDict(a=1.0)", "{0}['a']", "state['a'] = 2.0"),
    Kind(
        "a defaultdict's factory",
        "collections.defaultdict(lambda: 1.0)",
        "copy.copy({0})['x']",
        "state.default_factory = lambda: 2.0",
        is_wrapped=True,
    ),
    Kind("a tuple of a list", "([1.0, 1.0],)", "{0}[0][1]", "state[0][1] = 2.0"),
    Kind("a tuple of an array", "(np.ones(2), 1)", "float({0}[0][1])", "state[0][1] = 2.0"),
    Kind("a list of an array", "[np.ones(20_000)]", "float({0}[0][9])", "state[0][9] = 2.0"),
    Kind("a dict of an array", "{'a': np.ones(9)}", "float({0}['a'][1])", "state['a'][1] = 2.0"),
    Kind(
        "lists, seven deep",
        SEVEN,
        "{0}[0][0][0][0][0][0][0]",
        "state[0][0][0][0][0][0][0] = 2.0",
    ),
    Kind("a mix, seven deep", DEEP, "{0}.a['b'][0].c['d'][0]", "state.a['b'][0].c['d'][0] = 2.0"),
    Kind(
        "a ChainMap, set",
        "collections.ChainMap({}, {'rate': 1.0})",
        "{0}['rate']",
        "state.maps[1]['rate'] = 2.0",
    ),
    Kind(
        "a ChainMap, hidden",
        "collections.ChainMap({}, {'rate': 1.0})",
        "{0}['rate']",
        "state['rate'] = 2.0",
    ),
    Kind(
        "a proxy of a dict",
        "types.MappingProxyType(KEPT)",
        "{0}['rate']",
        "KEPT['rate'] = 2.0",
        before="KEPT = {'rate': 1.0}",
    ),
    Kind(
        "the values of a dict",
        "KEPT.values()",
        "list({0})[0]",
        "KEPT['rate'] = 2.0",
        before="KEPT = {'rate': 1.0}",
    ),
    Kind(
        "the keys of a dict",
        "KEPT.keys()",
        "float(len({0}))",
        "KEPT['more'] = 2.0",
        before="KEPT = {'rate': 1.0}",
    ),
    Kind("a UserDict", "collections.UserDict(rate=1.0)", "{0}['rate']", "state['rate'] = 2.0"),
    Kind("a UserList", "collections.UserList([1.0, 1.0])", SECOND, SET_SECOND),
    Kind("a heap in a list", "[1.0, 5.0]", "min({0}) ", "heapq.heapreplace(state, 2.0)"),
    Kind("a queue", "queue.SimpleQueue()", "{0}.qsize() + 1.0", "state.put(1)"),
    Kind("an iterator", "iter([1.0, 2.0])", "{0}.__length_hint__() - 1.0", "next(state)"),
)

OBJECTS = (
    Kind("a namespace", "types.SimpleNamespace(rate=1.0)", RATE, SET_RATE),
    Kind("a namespace, added", "types.SimpleNamespace()", DEFAULT, ADD),
    Kind("a namespace of a list", "types.SimpleNamespace(a=[1.0])", "{0}.a[0]", "state.a[0] = 2.0"),
    Kind("arguments", "argparse.Namespace(rate=1.0)", RATE, SET_RATE),
    Kind("arguments, added", "argparse.Namespace()", DEFAULT, ADD),
    Kind("an object", "Options()", RATE, SET_RATE, before=OPTIONS),
    Kind(
        "an object, deleted",
        "Options()",
        "{0}.rate + (0 if 'rate' in vars({0}) else 1)",
        "del state.rate",
        before=OPTIONS,
    ),
    Kind("an object, added", "Options()", DEFAULT, ADD, before=EMPTY),
    Kind(
        "an object, asked",
        "Options()",
        "2.0 if hasattr({0}, 'a') else 1.0",
        "state.a = 1",
        before=EMPTY,
    ),
    Kind("an object, tried", "Options()", "{0}.read()", ADD, before=TRY),
    Kind(
        "an object's dict", "Options()", "2.0 if 'power' in vars({0}) else 1.0", ADD, before=EMPTY
    ),
    Kind(
        "an object's names", "Options()", "2.0 if 'power' in dir({0}) else 1.0", ADD, before=EMPTY
    ),
    Kind(
        "an object's number of attributes", "Options()", "len(vars({0})) + 1.0", ADD, before=EMPTY
    ),
    Kind("an object, other attributes", "Options()", "{0}.power", ADD, before=FALLBACK),
    Kind("an attribute of a class", "Options()", RATE, "type(state).rate = 2.0", before=SUBCLASS),
    Kind("an attribute of a base", "Options()", RATE, "Base.rate = 2.0", before=SUBCLASS),
    Kind(
        "an attribute of a class, added", "Options()", DEFAULT, "Base.power = 2.0", before=SUBCLASS
    ),
    Kind("an attribute of a class itself", "Options", RATE, "state.rate = 2.0", before=SUBCLASS),
    Kind("a dataclass", "Options()", RATE, SET_RATE, before=DATACLASS),
    Kind("a dataclass, added", "Options()", DEFAULT, ADD, before=DATACLASS),
    Kind(
        "a dataclass as a dict",
        "Options()",
        "dataclasses.asdict({0})['rate']",
        SET_RATE,
        before=DATACLASS,
    ),
    Kind(
        "a frozen dataclass",
        "Options()",
        RATE,
        "object.__setattr__(state, 'rate', 2.0)",
        before=FROZEN,
    ),
    Kind("a frozen dataclass, replaced", "Options()", RATE, other="Options(2.0)", before=FROZEN),
    Kind("attrs", "Options()", RATE, SET_RATE, before=ATTRS),
    Kind("slots", "Slots()", "{0}.rate", SET_RATE, before=slots("('rate',)", "self.rate")),
    Kind("one slot", "Slots()", "{0}.rate", SET_RATE, before=slots("'rate'", "self.rate")),
    Kind(
        "a private slot",
        "Slots()",
        "{0}._Slots__rate",
        "state._Slots__rate = 2.0",
        before=slots("('__rate',)", "self.__rate"),
    ),
    Kind("a slot, added", "Slots()", DEFAULT, ADD, before=slots("('rate', 'power')", "self.rate")),
    Kind(
        "a slot of a list",
        "Slots()",
        "{0}.rate[0]",
        "state.rate[0] = 2.0",
        before=slots("['rate']", "self.rate").replace("1.0", "[1.0]"),
    ),
    Kind(
        "a named tuple",
        "Options(1.0, None)",
        RATE,
        other="Options(2.0, None)",
        before=NAMED,
    ),
    Kind(
        "a named tuple of an array",
        "Options(1.0, np.ones(2))",
        "float({0}.table[1])",
        "state.table[1] = 2.0",
        before=NAMED,
    ),
    Kind("a subclass of dict", "Options()", RATE, SET_RATE, before=OWN_DICT, is_wrapped=True),
    Kind("a subclass of list", "Options()", RATE, SET_RATE, before=OWN_LIST, is_wrapped=True),
    Kind("a subclass of float", "Options(1)", RATE, SET_RATE, before=OWN_FLOAT),
    Kind("a subclass of an array", "np.ones(2).view(Options)", RATE, SET_RATE, before=OWN_ARRAY),
    Kind(
        "a dict that makes values",
        "Options()",
        "{0}['a']",
        "state['a'] = 2.0",
        before=MISSING,
        is_wrapped=True,
    ),
    Kind(
        "a dict with other items",
        "shadowed()",
        "{0}['a']",
        "state.kept = {'a': 2.0}",
        before=SHADOWED
        + "\ndef shadowed():\n    made = Options()\n    made.kept = {'a': 1.0}\n    return made",
        is_wrapped=True,
    ),
    Kind("an enum's value", "Mode.ONE", "{0}.value[0]", "state.value[0] = 2.0", before=ENUM),
    Kind("an enum", "Mode.ONE", "{0}.value[0]", other="Mode.TWO", before=ENUM),
    Kind(
        "a context variable",
        "contextvars.ContextVar('a', default=1.0)",
        "{0}.get()",
        "state.set(2.0)",
    ),
    Kind(
        "a weak reference", "weakref.ref(TARGET)", "{0}().rate", "TARGET.rate = 2.0", before=TARGET
    ),
    Kind(
        "a dead weak reference",
        "weakref.ref(KEPT[0])",
        "2.0 if {0}() is None else 1.0",
        "KEPT.clear()",
        before=TARGET + "\nKEPT = [Options()]",
    ),
    Kind("a weak proxy", "weakref.proxy(TARGET)", "{0}.rate", "TARGET.rate = 2.0", before=TARGET),
    Kind(
        "a weak dictionary",
        "weakref.WeakKeyDictionary({TARGET: 1.0})",
        "{0}[TARGET]",
        "state[TARGET] = 2.0",
        before=TARGET,
    ),
    Kind("another class", "One()", "{0}.rate()", "state.__class__ = Two", before=CLASSES),
    Kind("a method of a class", "One()", "{0}.rate()", "One.rate = Two.rate", before=CLASSES),
    Kind(
        "a method of an object", "One()", "{0}.rate()", "state.rate = lambda: 2.0", before=CLASSES
    ),
    Kind(
        "a bound method",
        "One().rate",
        "{0}()",
        "One.rate.__code__ = Two.rate.__code__",
        before=CLASSES,
    ),
    Kind(
        "bases of a class",
        "Three()",
        "{0}.rate()",
        "Three.__bases__ = (Two,)",
        before=CLASSES + "\nclass Three(One):\n    pass",
    ),
    Kind(
        "a parser of settings",
        "parser()",
        "float({0}['a']['rate'])",
        "state['a']['rate'] = '2.0'",
        before=PARSER,
    ),
    Kind(
        "a logger's level",
        "logging.getLogger('states')",
        "1.0 + {0}.isEnabledFor(10)",
        "state.setLevel(9)",
        before="logging.getLogger('states').setLevel(30)",
    ),
    Kind("a mock", "mock.Mock(rate=1.0)", RATE, SET_RATE),
    Kind(
        "a string template",
        "string.Template('a')",
        "float(len({0}.template))",
        "state.template = 'ab'",
    ),
    Kind("an event", "threading.Event()", "1.0 + {0}.is_set()", "state.set()"),
    Kind("a message", "email.message.Message()", "float({0}['rate'] or 1)", "state['rate'] = '2'"),
)

FUNCTIONS = (
    Kind("a function", "one", "{0}()", other="two", before=TWO, is_bound=True),
    Kind(
        "a function's code",
        "one",
        "{0}()",
        "one.__code__ = two.__code__",
        before=TWO,
        is_bound=True,
    ),
    Kind(
        "a function's attribute",
        "one",
        "getattr({0}, 'rate', 1.0)",
        "state.rate = 2.0",
        before=TWO,
        is_bound=True,
    ),
    Kind(
        "a function's default",
        "functools.partial(pick, [1.0])",
        "{0}()",
        "pick.__defaults__ = (2.0,)",
        before=PICK,
    ),
    Kind(
        "keywords of a partial",
        "functools.partial(pick, [1.0], rate=1.0)",
        "{0}()",
        "state.keywords['rate'] = 2.0",
        before=PICK,
    ),
    Kind(
        "a list in a partial",
        "functools.partial(pick, [1.0])",
        "{0}()",
        "state.args[0][0] = 2.0",
        before=PICK,
    ),
    Kind(
        "a partial of a partial",
        "functools.partial(functools.partial(pick, [1.0]))",
        "{0}()",
        "state.args[0][0] = 2.0",
        before=PICK,
    ),
    Kind("a lambda", "lambda: 1.0", "{0}()", other="lambda: 2.0", is_bound=True),
    Kind(
        "a callable object",
        "Options()",
        "{0}()",
        SET_RATE,
        before=OPTIONS + "\n    def __call__(self):\n        return self.rate",
    ),
    Kind(
        "a cached function",
        "cached",
        "{0}('a')",
        "RATES[0] = 2.0\n    cached.cache_clear()",
        before=CACHED,
        is_bound=True,
    ),
    Kind(
        "the size of a cache",
        "cached",
        "{0}.cache_info().currsize + 1.0",
        "cached('b')",
        before=CACHED,
        is_bound=True,
    ),
    Kind(
        "a cached property",
        "Options()",
        "{0}.scale",
        "state.rate = 2.0\n    vars(state).pop('scale', None)",
        before=CACHED_PART,
    ),
    Kind(
        "a name of a cell",
        "CELL['cell']",
        "{0}()",
        "CELL['RATE'] = 2.0",
        before=CELL,
        is_bound=True,
    ),
    Kind(
        "a name of a cell, added",
        "CELL['cell']",
        "{0}()",
        "CELL['abs'] = lambda x: 2.0",
        before=CELL.replace("RATE', CELL", "abs(-1.0)', CELL"),
        is_bound=True,
    ),
    Kind(
        "an itemgetter", "operator.itemgetter(0)", "{0}([1.0, 2.0])", other="operator.itemgetter(1)"
    ),
    Kind("a method of a list", "[1.0].count", "{0}(1.0) + 0.0", "state.__self__.append(1.0)"),
    Kind("a method of a dict", "{'a': 1.0}.get", "{0}('a')", "state.__self__['a'] = 2.0"),
    Kind(
        "a random generator",
        "random.Random(0)",
        "1.0 if copy.copy({0}).random() > 0.8 else 2.0",
        "state.seed(1)",
    ),
)

ARRAYS = (
    Kind("a small array", "np.ones(2)", "float({0}[1])", "state[1] = 2.0"),
    Kind("an array of 2 MB", "np.ones(262_144)", "float({0}[70_000])", "state[70_000] = 2.0"),
    Kind("an array of 20 MB", "np.ones(2_621_440)", "float({0}[999_999])", "state[999_999] = 2.0"),
    Kind("an array's shape", "np.ones((2, 1))", "float({0}.shape[1])", "state.shape = (1, 2)"),
    Kind(
        "an array of objects",
        "np.array([1.0, [1.0]], dtype=object)",
        "{0}[1][0]",
        "state[1][0] = 2.0",
    ),
    Kind("a number of NumPy", "np.float64(1.0)", "float({0})", other="np.float64(2.0)"),
    Kind(
        "a masked array",
        "np.ma.array([1.0, 2.0], mask=[0, 1])",
        "float({0}.sum()) ",
        "state.mask[1] = False",
    ),
    Kind("a view of an array", "np.ones(9)[::2]", "float({0}[1])", "state[1] = 2.0"),
    Kind(
        "a structured array",
        "np.ones(2, dtype=[('rate', 'f4')])",
        "float({0}['rate'][1])",
        "state['rate'][1] = 2.0",
    ),
    Kind("an array of Python", "array.array('d', [1.0, 1.0])", SECOND, SET_SECOND),
    Kind("a bytearray", "bytearray(b'11')", "{0}[1] - 48.0", "state[1] = 50"),
    Kind("a memory view", "memoryview(bytearray(b'11'))", "{0}[1] - 48.0", "state[1] = 50"),
    Kind("a structure of C", "ctypes.c_double(1.0)", "{0}.value", "state.value = 2.0"),
    Kind(
        "a file in memory",
        "io.StringIO('1.0')",
        "float({0}.getvalue())",
        "state.seek(0)\n    state.write('2.0')",
    ),
    Kind("a tensor", "torch.tensor(1.0)", "{0}", "state.fill_(2.0)"),
    Kind("a tensor's data", "torch.tensor(1.0)", "{0}", "state.data = torch.tensor(2.0)"),
    Kind("a tensor's attribute", "torch.tensor(1.0)", DEFAULT, ADD),
    Kind("a tensor that is read", "torch.ones(2)", "float({0}[1])", "state[1] = 2.0"),
    Kind(
        "a parameter",
        "torch.nn.Parameter(torch.tensor(1.0))",
        "{0}.detach()",
        "state.data.fill_(2.0)",
        is_wrapped=True,
    ),
    Kind("a list of a tensor", "[torch.tensor(1.0)]", "{0}[0]", "state[0].fill_(2.0)"),
    Kind(
        "a torch module's option",
        "torch.nn.Threshold(1.0, 2.0)",
        "{0}.threshold",
        "state.threshold = 2.0",
    ),
    Kind(
        "a torch module's buffer",
        "torch.nn.BatchNorm1d(1)",
        "float({0}.running_var[0])",
        "state.running_var.fill_(2.0)",
    ),
    Kind(
        "a torch module's mode",
        "torch.nn.Identity()",
        "1.0 if {0}.training else 2.0",
        "state.eval()",
    ),
    Kind(
        "a torch module's forward",
        "torch.nn.Identity()",
        "{0}(1.0)",
        "state.forward = lambda x: 2.0",
    ),
    Kind(
        "a torch module's hook",
        "torch.nn.Identity()",
        "{0}(1.0)",
        "state.register_forward_hook(lambda *given: 2.0)",
    ),
    Kind(
        "a device",
        "torch.device('cpu')",
        "1.0 + ({0}.type == 'meta')",
        other="torch.device('meta')",
    ),
    Kind(
        "a generator of NumPy",
        "np.random.default_rng(0)",
        "1.0 if copy.deepcopy({0}).random() > 0.6 else 2.0",
        "state.random()",
    ),
    Kind(
        "a policy of Keras",
        "keras.DTypePolicy('float32')",
        "1.0 + ({0}.name == 'float64')",
        other="keras.DTypePolicy('float64')",
    ),
)

KINDS = (*PLAIN, *CONTAINERS, *OBJECTS, *FUNCTIONS, *ARRAYS)
