"""The rule of captured steps: which code is known to read nothing that a guard does not see.

Python code outside these tables is read as the user's. C code outside them is refused (ADR 55).
"""

import re
import sys
from collections.abc import Mapping
from types import MappingProxyType

# Libraries whose code reads, between steps, only what guards and signatures compare.
LIBRARIES: Mapping[str, str] = MappingProxyType(
    {
        "absl.logging": "writes messages, as keras-hub's layers do: an effect",
        "attr": "makes classes",
        "attrs": "makes classes",
        "keras": "its settings and attributes are compared",
        "ml_dtypes": "number types",
        "numpy": "arrays are compared; its global generator too",
        "optree": "maps nests",
        "shardcore": "its state belongs to a distribution, which a signature names",
        "tensorflow": "Keras' preprocessing asks it whether it is building a graph",
        "torch": "its modes belong to a signature; its generators are recorded",
        "typing_extensions": "types",
    }
)

# Modules of the standard library whose results depend on their operands only.
PURE_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "__future__": "names of features",
        "_collections_abc": "mixins of containers",
        "_py_abc": "registered classes",
        "_weakrefset": "sets of weak references",
        "abc": "registered classes",
        "ast": "reads source text that it is given",
        "base64": "bytes to bytes",
        "bisect": "searches a list",
        "codecs": "text to bytes",
        "collections": "containers",
        "colorsys": "numbers to numbers",
        "contextlib": "calls what it is given",
        "copy": "reads all attributes of what it is given",
        "copyreg": "reads the class of what it is given",
        "dataclasses": "reads all attributes of what it is given",
        "enum": "members are compared",
        "encodings": "text to bytes",
        "fractions": "numbers",
        "functools": "calls what it is given; caches are compared",
        "genericpath": "text of paths; its questions to the file system are refused by name",
        "heapq": "orders a list",
        "importlib": "runs once for a module",
        "inspect": "reads signatures and classes",
        "json": "text to values",
        "keyword": "words of Python",
        "linecache": "lines for messages",
        "logging": "writes messages: an effect; levels are compared",
        "numbers": "abstract numbers",
        "operator": "calls what it is given",
        "posixpath": "text of paths; its questions to the file system are refused by name",
        "os": "text of paths; the environment is compared; calls of the system are refused by name",
        "pprint": "values to text",
        "re": "matches text",
        "reprlib": "values to text",
        "sre_compile": "patterns",
        "sre_parse": "patterns",
        "statistics": "numbers",
        "string": "text",
        "struct": "bytes",
        "textwrap": "text",
        "threading": "locks, and the current thread, on which all steps run",
        "token": "words of Python",
        "tokenize": "words of Python",
        "traceback": "text for messages",
        "types": "classes",
        "typing": "types",
        "warnings": "writes messages: an effect",
        "weakref": "what it refers to is compared",
        "zipimport": "runs once for a module",
    }
)

# Modules whose calls of C are effects, or happen once.
EFFECTS = frozenset({"importlib", "linecache", "logging", "threading", "traceback", "warnings"})

# Functions of Python, by module and name, that read or set what no guard sees.
REFUSED_FUNCTIONS = frozenset(
    {
        *("importlib.import_module", "importlib.reload"),
        *(f"inspect.{name}" for name in ("stack", "currentframe", "trace", "getmembers")),
        *(f"linecache.{name}" for name in ("getline", "getlines")),
        *(f"numpy.{name}" for name in ("load", "loadtxt", "genfromtxt", "fromregex")),
        *(f"numpy.{name}" for name in ("get_printoptions", "geterr", "geterrcall", "getbufsize")),
        *("torch.is_warn_always_enabled", "torch.get_deterministic_debug_mode"),
        *(f"torch.set_default_{name}" for name in ("dtype", "device", "tensor_type")),
        *("torch.get_printoptions", "torch.get_default_device", "torch.get_file_path"),
        *(f"threading.{name}" for name in ("active_count", "enumerate")),
        *("torch.load", "torch.hub.load", "torch.seed", "torch.initial_seed"),
        *("torch.get_rng_state", "random.Random.getstate", "torch.get_sharing_strategy"),
        *(f"absl.logging.level_{level}" for level in ("debug", "info", "warning", "error")),
        *(
            "absl.logging.get_verbosity",
            "absl.logging.vlog_is_on",
            "absl.logging.get_log_file_name",
        ),
        *("logging.getLevelName", "logging.getLevelNamesMapping", "logging.getLogRecordFactory"),
        *(f"torch.cuda.{name}" for name in ("memory_allocated", "mem_get_info", "memory_stats")),
        *(f"posixpath.{name}" for name in ("realpath", "abspath", "expanduser", "expandvars")),
        *(f"genericpath.{name}" for name in ("exists", "isfile", "isdir", "getsize", "getmtime")),
    }
)

# Libraries call these too, where the profile does not know the caller.
USED_BY_LIBRARIES = frozenset(
    {"torch.get_rng_state", "random.Random.getstate", "logging.getLevelName"}
)

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
# Functions of C that may return something else in the next step.
_CHANGING = frozenset(
    {
        *(f"time.{name}{suffix}" for name in _CLOCKS for suffix in ("", "_ns")),
        *(f"time.{name}" for name in ("localtime", "gmtime", "ctime", "strftime", "asctime")),
        *("now", "utcnow", "today"),  # of `datetime`, whose class has no name in a profile
        *(f"builtins.{name}" for name in ("open", "input", "globals", "eval", "exec", "compile")),
        *("io.open", "io.open_code", "numpy.fromfile", "_numpy.fromfile"),
        *("numpy._core._multiarray_umath.fromfile", "numpy.core.multiarray.fromfile"),
        *("sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers"),
        *("torch.get_num_interop_threads", "torch.is_warn_always_enabled", "sys.getrecursionlimit"),
        *(
            "sys.getswitchinterval",
            "sys.gettrace",
            "sys.getprofile",
            "gc.isenabled",
            "gc.get_count",
        ),
        "_thread.stack_size",
        *("gc.get_threshold", "gc.get_stats", "sys.getrefcount", "sys.get_int_max_str_digits"),
    }
)

_CHANGING_METHODS = frozenset({("get_state", "numpy.random.mtrand.RandomState")})

# Modules of C whose functions depend on their operands, or change nothing that a step reads.
_C_MODULES = frozenset(
    {
        *("_abc", "_bisect", "_codecs", "_collections", "_contextvars", "_functools", "_heapq"),
        *("_imp", "_json", "_opcode", "_operator", "_random", "_sre", "_string", "_struct"),
        *("_thread", "_typing", "_warnings", "_weakref", "binascii", "builtins", "cmath"),
        *("collections", "functools", "itertools", "marshal", "math", "ml_dtypes", "numpy"),
        *("operator", "optree", "re", "torch", "types", "typing", "unicodedata", "zlib"),
        *("_tracemalloc", "_datetime", "datetime", "_ast", "_symtable", "_decimal", "_weakrefset"),
        *("tensorflow", "copyreg", "array", "faulthandler", "_scproxy", "shardcore"),
    }
)
_C_FUNCTIONS = frozenset(
    {
        *("posix.fspath", "gc.collect", "gc.disable", "gc.enable", "posix.getpid"),
        *(f"sys.{name}" for name in ("audit", "exc_info", "getsizeof")),
        *(f"sys.{name}" for name in ("intern", "is_finalizing", "setprofile", "settrace")),
        *("gc.get_referents", "gc.is_tracked", "gc.freeze", "sys._is_gil_enabled", "sys.exception"),
    }
)
# Types of C with a module in their name, whose methods read what the object itself holds. A file
# may be written to: that is an effect.
_C_TYPES = re.compile(
    r"collections\.|re\.|_sre\.|_thread\.|functools\.|itertools\.|operator\.|types\.|typing\."
    r"|weakref\.|datetime\.|decimal\.|array\.|_struct\.|_random\.|numpy\.|torch|optree\."
    r"|ml_dtypes\.|_contextvars\.|_abc\.|_collections\.|_io\.StringIO|_io\.BytesIO|tensorflow\."
    r"|_functools\.|contextvars\.|_operator\.|_lsprof\."
    r"|uuid\.|zoneinfo\.|ipaddress\.|pathlib\.|inspect\.|fractions\."
)
# Methods of locks that return whether one is held. A `with` block calls neither.
_ASK_LOCKS = frozenset({"locked", "acquire"})
_WRITES = frozenset({"write", "flush", "writelines", "isatty", "fileno"})
_OF_TYPE = re.compile(r"<(?:method|slot wrapper) '(.*)' of '(.*)' objects>")
_OF_MODULE = re.compile(r"<built-in (?:method|function) ([\w.]+?)( of .*)?>")


def is_setting(function: str) -> bool:
    """Tells whether a function of C reads a setting or a lock, as libraries do too.

    Example:
        >>> is_setting("<built-in method sys.getrecursionlimit>")
        True
    """
    of_type = _OF_TYPE.match(function)
    is_of_lock = of_type is not None and of_type.group(1) in _ASK_LOCKS
    return is_of_lock or function.startswith(("<built-in method sys.", "<built-in method gc."))


def bare_name(function: str) -> str:
    """Strips the module or class from cProfile's name of a function of C.

    Example:
        >>> bare_name("<method 'acquire' of '_thread.lock' objects>")
        'acquire'
    """
    of_type = _OF_TYPE.match(function)
    return of_type.group(1) if of_type else function.rstrip(">").rpartition(".")[2]


def is_library(module: str) -> bool:
    """Looks up a module, or the top package of it, in `LIBRARIES`.

    Example:
        >>> is_library("torch.nn"), is_library("absl.logging"), is_library("absl.flags")
        (True, True, False)
    """
    return module.partition(".")[0] in LIBRARIES or module in LIBRARIES


def is_standard(module: str) -> bool:
    """Asks Python, by the top package."""
    return module.partition(".")[0] in sys.stdlib_module_names


def is_pure(module: str) -> bool:
    """Looks up the top package of a module in `PURE_MODULES`."""
    return module.partition(".")[0] in PURE_MODULES


def is_effect(module: str) -> bool:
    """Looks up the top package of a module in `EFFECTS`."""
    return module.partition(".")[0] in EFFECTS


def why_unknown(function: str) -> str:
    """Finds why a function of C may not be captured; empty if it may.

    Args:
        function: The name that `cProfile` has for it.

    Example:
        >>> why_unknown("<built-in method time.time>")
        'calls time.time(), which may return something else in each step'
        >>> why_unknown("<method 'append' of 'list' objects>")
        ''
        >>> why_unknown("<built-in method tokenizers.encode>")
        'calls tokenizers.encode(), which is C code that may read anything'
    """
    if of_type := _OF_TYPE.match(function):
        name, kind = of_type.groups()
        if (name, kind) in _CHANGING_METHODS:
            return f"calls {kind}.{name}(), which may return something else in each step"
        is_file = kind.startswith("_io.") and name in _WRITES
        if kind.startswith("_thread.") and name in _ASK_LOCKS:
            return f"calls {kind}.{name}(), which may return something else in each step"
        if name == "__subclasses__":
            return "calls type.__subclasses__(), which may return something else in each step"
        if is_file or "." not in kind or _C_TYPES.match(kind):
            return ""
        return f"calls {kind}.{name}(), which is C code that may read anything"
    of_module = _OF_MODULE.match(function)
    if of_module is None:
        return ""  # the `repr` of a method of a class that is not in a module
    name, bound = of_module.groups()
    name = re.sub(r"^_io\.", "io.", name)  # its name in Python 3.12
    if name in ("builtins.exec", "builtins.eval"):
        return (
            f"calls {name}(), which may run any code (dataclass and namedtuple call it: define "
            "such classes outside of the step)"
        )
    if name in _CHANGING:
        return f"calls {name}(), which may return something else in each step"
    module = name.rpartition(".")[0]
    if bound or not module or module.partition(".")[0] in _C_MODULES or name in _C_FUNCTIONS:
        return ""
    return f"calls {name}(), which is C code that may read anything"


def is_known_class(name: str) -> bool:
    """Tells whether a class of C, if it is one, reads only what it is given.

    Example:
        >>> is_known_class("itertools.count"), is_known_class("_io.FileIO")
        (True, False)
    """
    root = name.partition(".")[0]
    return is_library(name) or root in _C_MODULES or _C_TYPES.match(name) is not None


def remedy(function: str) -> str:
    """Writes the advice for a step that calls a function which may not be captured.

    Args:
        function: The name of the function, or the one that `cProfile` has for it.

    Example:
        >>> remedy("<built-in method time.perf_counter>")
        'time steps in a callback, by on_train_batch_begin and on_train_batch_end'
    """
    if any(f"time.{clock}" in function for clock in _CLOCKS):
        return "time steps in a callback, by on_train_batch_begin and on_train_batch_end"
    if re.search(r"\b(?:Sem|R)?[lL]ock\b", function):
        return "take the lock outside of the step, as in a callback"
    return "pass that in the batch, or keep it in a variable"
