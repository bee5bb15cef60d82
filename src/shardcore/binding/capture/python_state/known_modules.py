"""The modules whose code is known to read nothing that a guard does not see (ADR 55)."""

import sys
from collections.abc import Mapping
from types import MappingProxyType

# Libraries whose code reads, between steps, only what guards and signatures compare.
LIBRARIES: Mapping[str, str] = MappingProxyType(
    {
        "IPython.core.interactiveshell": "passes on what a notebook writes: an effect",
        "_pytest.capture": "keeps what a test prints: an effect",
        "absl.logging": "writes messages, as keras-hub's layers do: an effect",
        "attr": "makes classes",
        "attrs": "makes classes",
        "ipykernel": "shows in a notebook what is written: an effect",
        "keras": "its settings and attributes are compared",
        "ml_dtypes": "number types",
        "numpy": "arrays are compared; its global generator too",
        "optree": "maps nests",
        "shardcore": "its state belongs to a distribution, which a signature names",
        "tensorflow": "Keras' preprocessing asks it whether it is building a graph",
        "torch": "its modes belong to a signature; its generators are recorded",
        "typing_extensions": "types",
        "zmq.error": "makes errors, for ipykernel",
        "zmq.sugar.socket": "sends, for ipykernel; code that reads a socket is refused",
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
        "hashlib": "bytes to bytes",
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
        "shlex": "text to words; what reads the standard input is refused by name",
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

# Modules of streams that show what is printed: of these the identity is compared alone.
STREAMS = frozenset({"_pytest.capture", "ipykernel.iostream"})

# Modules whose calls of C are effects, or happen once.
EFFECTS = frozenset({"importlib", "linecache", "logging", "threading", "traceback", "warnings"})


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
