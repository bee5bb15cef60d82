"""The rule of captured steps: which functions are known to read nothing that a guard does not see.

Python code of modules that are not known is read as the user's. C code outside these tables is
refused (ADR 55).
"""

import re

from shardcore.binding.capture.python_state.known_modules import is_library

# No profile has what another thread does for the step.
_OTHER_THREADS = ("Thread.start", "Thread.join", "Condition.wait", "Event.wait")
_OF_INSPECT = ("stack", "currentframe", "trace", "getmembers", "get_annotations")
# Functions of Python that read or set what no guard sees: the package, and the name in its module.
REFUSED_FUNCTIONS = frozenset(
    {
        *("importlib.import_module", "importlib.reload", "typing.get_type_hints"),
        *(f"inspect.{name}" for name in _OF_INSPECT),
        *(f"linecache.{name}" for name in ("getline", "getlines")),
        *(f"numpy.{name}" for name in ("load", "loadtxt", "genfromtxt", "fromregex")),
        *(f"numpy.{name}" for name in ("get_printoptions", "geterr", "geterrcall", "getbufsize")),
        *("torch.is_warn_always_enabled", "torch.get_deterministic_debug_mode"),
        "torch.check_sparse_tensor_invariants.is_enabled",
        *(f"torch.set_default_{name}" for name in ("dtype", "device", "tensor_type")),
        *("torch.get_printoptions", "torch.get_default_device", "torch.get_file_path"),
        *(f"threading.{name}" for name in ("active_count", "enumerate", *_OTHER_THREADS)),
        *("IPython.get_ipython", "traitlets.SingletonConfigurable.instance"),
        *("concurrent.Future.result", "concurrent.Executor.map", "queue.Queue.get"),
        *(f"traceback.{name}" for name in ("format_exc", "format_stack", "extract_stack")),
        *("torch.load", "torch.get_dir", "torch.seed", "torch.initial_seed"),
        *("torch.get_rng_state", "random.Random.getstate", "torch.get_sharing_strategy"),
        *(f"absl.level_{level}" for level in ("debug", "info", "warning", "error")),
        *("absl.get_verbosity", "absl.vlog_is_on", "absl.get_log_file_name"),
        *("logging.getLevelName", "logging.getLevelNamesMapping", "logging.getLogRecordFactory"),
        *(f"torch.{name}" for name in ("memory_allocated", "mem_get_info", "memory_stats")),
        *(f"posixpath.{name}" for name in ("realpath", "abspath", "expanduser", "expandvars")),
        *(f"genericpath.{name}" for name in ("exists", "isfile", "isdir", "getsize", "getmtime")),
    }
)

# Libraries call these too, where the profile does not know the caller.
USED_BY_LIBRARIES = frozenset(
    {
        *("torch.get_rng_state", "random.Random.getstate", "logging.getLevelName"),
        *("inspect.get_annotations", "typing.get_type_hints"),
    }
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
        *("_thread.stack_size", "_weakref.getweakrefcount", "_weakref.getweakrefs"),
        *("sys.exc_info", "sys.exception", "sys.getsizeof"),
        *("gc.get_threshold", "gc.get_stats", "sys.getrefcount", "sys.get_int_max_str_digits"),
    }
)

_CHANGING_METHODS = frozenset({("get_state", "numpy.random.mtrand.RandomState")})

# Attributes by which code reads what no guard compares: of frames, tracebacks and classes, of the
# memory of tensors, and of torch's backends, some of which raise where another name was set. A
# name in code may be that of any object.
REFUSED_ATTRIBUTES = frozenset(
    {
        *("__traceback__", "tb_frame", "f_back", "f_locals", "gi_frame", "cr_frame", "ag_frame"),
        *("__abstractmethods__", "__annotations__", "__weakref__"),
        *("is_shared", "storage_offset", "untyped_storage", "allow_tf32", "fp32_precision"),
    }
)

# Modules of C whose functions depend on their operands, or change nothing that a step reads.
_C_MODULES = frozenset(
    {
        *("_abc", "_bisect", "_codecs", "_collections", "_contextvars", "_functools", "_heapq"),
        *("_imp", "_json", "_opcode", "_operator", "_random", "_sre", "_string", "_struct"),
        *("_thread", "_typing", "_warnings", "_weakref", "binascii", "builtins", "cmath"),
        *("collections", "functools", "itertools", "marshal", "math", "ml_dtypes", "numpy"),
        *("operator", "optree", "re", "torch", "types", "typing", "unicodedata", "zlib"),
        *("_datetime", "datetime", "_ast", "_symtable", "_decimal", "_weakrefset"),
        *("tensorflow", "copyreg", "array", "_scproxy", "shardcore"),
        *(f"_{name}" for name in ("hashlib", "md5", "blake2", "sha1", "sha2", "sha3")),
        *(f"_{name}" for name in ("sha256", "sha512")),
    }
)
_C_FUNCTIONS = frozenset(
    {
        *("posix.fspath", "gc.collect", "gc.disable", "gc.enable", "posix.getpid"),
        *(f"sys.{name}" for name in ("audit", "intern", "is_finalizing", "setprofile", "settrace")),
        *("gc.get_referents", "gc.is_tracked", "gc.freeze", "sys._is_gil_enabled"),
    }
)
# Types of C with a module in their name, whose methods read what the object itself holds. A file
# may be written to: that is an effect.
_C_TYPES = re.compile(
    r"collections\.|re\.|_sre\.|_thread\.|functools\.|itertools\.|operator\.|types\.|typing\."
    r"|weakref\.|datetime\.|decimal\.|array\.|_struct\.|_random\.|numpy\.|torch|optree\."
    r"|ml_dtypes\.|_contextvars\.|_abc\.|_collections\.|_io\.StringIO|_io\.BytesIO|tensorflow\."
    r"|_functools\.|contextvars\.|_operator\.|_lsprof\."
    r"|_hashlib\.|_md5\.|_sha\d+\.|_blake2\."
    r"|uuid\.|zoneinfo\.|ipaddress\.|pathlib\.|inspect\.|fractions\."
)
# Bases of classes of files, without a state.
_BASES_OF_FILES = frozenset({"_io._IOBase", "_io._TextIOBase"})
_ASKS_TORCH = re.compile(r"torch\.\w+\._(?:is|get|check)_")  # privately
_SETTINGS = re.compile(rf"<built-in method (?:sys\.|gc\.|_weakref\.getweak|{_ASKS_TORCH.pattern})")
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
    return is_of_lock or bool(_SETTINGS.match(function))


def bare_name(function: str) -> str:
    """Strips the module or class from cProfile's name of a function of C.

    Example:
        >>> bare_name("<method 'acquire' of '_thread.lock' objects>")
        'acquire'
    """
    of_type = _OF_TYPE.match(function)
    return of_type.group(1) if of_type else function.rstrip(">").rpartition(".")[2]


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
    if name in _CHANGING or _ASKS_TORCH.match(name):
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
    is_type = _C_TYPES.match(name) is not None or name in _BASES_OF_FILES
    return is_library(name) or root in _C_MODULES or is_type


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
