"""No module of shardcore keeps mutable state: the installation has all of it.

`uninstall()` drops the installation, and with it all that shardcore has noted. This reads each
module for what would outlive it: variables of a module that change, caches, and what a module or a
function does to the process. What is left has its reason here. That a process is as before is
tested by tests/distributed/strategies/test_nothing_left.py.
"""

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.checks.tree import ROOT

PACKAGE = ROOT / "src" / "shardcore"
# Run in separate processes, which a plug-in's author starts.
LEFT_OUT = ("testing/", "__main__.py")

# Caches of functions of numbers, names and layouts: the same for everybody, and of no tensor.
PURE = ("domain/", "policies/")

ALLOWED = {
    "bootstrap/__init__.py: global _installed": "the installation",
    "bootstrap/environment.py: os.environ": "KERAS_BACKEND, which uninstall() unsets",
    "adapters/ranks/job/forked_ranks.py: os.environ": "of a rank",
    "adapters/ranks/launch/new_ranks.py: os.environ": "of a process that tries whether it can fork",
    "callback_api.py: environment.choose_backend() as it is imported": "its class is one of Keras",
    "engines_api.py: os.environ": "of a rank, in its own process",
    "bootstrap/ranks/sending.py: os.environ": "of a rank, in its own process",
    "bootstrap/ranks/sending.py: sys.argv": "likewise",
    "bootstrap/ranks/sending.py: sys.modules": "likewise",
    "bootstrap/ranks/sending.py: sys.path": "likewise",
    "adapters/ranks/failure/watch.py: sys.excepthook": "put back when the watch stops",
    "adapters/ranks/failure/main_thread.py: sys.unraisablehook": "likewise",
    "reporting/errors.py: sys.excepthook": "put back by uninstall(); set by a failing command",
    "cli/scripts.py: sys.modules": "the user's script, where pickling looks for its classes",
    "adapters/torch_private/tensors.py: sys.modules": "put back at the end of the `with`",
    "adapters/ranks/job/threads.py: _here": "of a thread, zero outside a `with`; read below torch",
    "ports/measurement.py: layer_scope": ("of a context, empty outside a `with`; read below torch"),
    "ports/measurement.py: redistribution_scope": "likewise",
    "ports/measurement.py: reduction_scope": "likewise",
    "ports/measurement.py: gradients_apart_scope": "likewise",
    "adapters/ranks/job/signed_store.py: _SECRETS": "of a process group: it outlives uninstall()",
    "adapters/ranks/failure/store.py: _RANKS": "likewise",
    "adapters/capture/recording/recorder.py: _recording": "likewise",
    "binding/capture/slices.py: _in_loop": "of a context, False outside a `with`; read below Keras",
    "binding/data/transfer.py: _open": "of a context, None outside a `with`; read below Keras",
    "binding/checkpoints/files/callbacks.py: _writes_files": "likewise",
    "binding/checkpoints/files/exports.py: _writes_export": "likewise",
    "binding/checkpoints/files/saving.py: weights_file_attributes": "likewise",
    "binding/engine/large_values.py: _shard_being_drawn": "likewise",
    "binding/ranks/ambient.py: ignoring_distributions": "likewise",
    "binding/ranks/collective_errors.py: _work_scope": "likewise",
    "binding/keras_private/patches.py: cache of _modules_of_keras": "of the modules of Keras",
    "adapters/capture/recording/functions.py: cache of seeded_by_tensor": "of functions of Keras",
    "adapters/capture/recording/functions.py: cache of _is_of_c": "of classes",
    "adapters/capture/recording/values.py: cache of _is_value": "of classes",
    "adapters/capture/recording/recorder.py: cache of _kind_of": "of operators",
    "adapters/source_line.py: cache of _is_skipped": "of names of files",
    "binding/capture/python_state/code_facts.py: cache of _names_by_file": "of Python's modules",
    **dict.fromkeys(
        (
            f"binding/capture/python_state/objects.py: cache of {name}"
            for name in (
                *("_dict_descriptor", "has_unknown_state", "is_immutable", "iterates_plainly"),
                *("slots_of", "overrides_torch_function"),
            )
        ),
        "of classes",
    ),
    "adapters/capture/trace.py: cache of numbered": "of values, by their numbers",
    "adapters/engine/declared/rules.py: _RULES": "of a user's operators, which torch keeps as long",
    "adapters/engine/dispatch.py: cache of _route": "of operators",
    "adapters/torch_private/collectives.py: cache of _collective_of": "of the names of operators",
    "adapters/torch_private/dispatch_modes.py: cache of _computes_nothing": "of operators",
    "adapters/torch_private/dtensor.py: cache of _operators": "names of operators, for torch 2.11",
    "adapters/torch_private/operators.py: cache of _written_arguments": "of operators",
    "adapters/torch_private/operators.py: cache of draws": "of operators",
    "adapters/torch_private/operators.py: cache of is_composite": "of operators",
    "adapters/torch_private/operators.py: cache of is_elementwise": "of operators",
    "adapters/torch_private/operators.py: cache of is_list_operator": "of operators",
    "adapters/torch_private/operators.py: cache of is_view": "of operators",
    "adapters/torch_private/operators.py: cache of kind_of_results": "of operators",
    "adapters/torch_private/operators.py: cache of writes_first": "of operators",
    "adapters/torch_private/operators.py: cache of writes_others": "of operators",
    "adapters/torch_private/operators.py: cache of writing_into": "of operators",
    "adapters/torch_private/collectives.py: cache of gather_safely": "a kernel, registered once",
    "adapters/engine/operators/views.py: cache of read_indices_by_operators": "likewise",
    "adapters/torch_private/unnamed_operators.py: cache of is_intel": "of the processor",
    "adapters/torch_private/trees.py: cache of _is_leaf": "of classes",
}

DISPLAYS = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
# What is called for a value that does not change, or that Python keeps for us.
CONSTANTS = {
    *("frozenset", "tuple", "compile", "MappingProxyType", "get_args", "object"),
    "find",  # a name of the Keras that is installed
    *("TypeVar", "ParamSpec", "getLogger", "log_of", "HookspecMarker", "HookimplMarker"),
}
CHANGING = {
    *("dict", "list", "set", "bytearray", "Counter", "OrderedDict", "defaultdict", "deque"),
    *("ContextVar", "local", "Lock", "RLock", "Event", "count", "cycle", "ExitStack", "Library"),
    *("SimpleNamespace", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary"),
    *("WeakIdKeyDictionary", "finalize", "ref"),
}
CHANGES = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("remove", "setdefault", "sort", "update"),
}
CACHES = {"cache", "lru_cache"}
# Objects of the process, by the modules that name them.
OF_THE_PROCESS = {"os", "sys", "threading", "warnings", "torch", "keras", "builtins", "signal"}


def state(tree: ast.Module, *, caches: bool = True) -> Iterator[str]:
    """The state of a module, and its changes to the process, by name.

    Args:
        tree: The module.
        caches: Whether a cache counts.
    """
    yield from _of_import(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from (f"global {name}" for name in node.names)
        elif isinstance(node, ast.ClassDef):
            yield from _of_class(node)
        yield from _of_the_process(node)
    if caches:
        yield from (f"cache of {name}" for name in _cached(tree))


def _of_import(tree: ast.Module) -> Iterator[str]:
    """The statements that run as the module is imported."""
    changed = set(_changed_names(tree))
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield f"{ast.unparse(statement)} as it is imported"
        for target, value in _assigned(statement):
            if isinstance(target, ast.Attribute | ast.Subscript):
                yield f"{ast.unparse(target)} as it is imported"
            elif isinstance(target, ast.Name) and _may_change(target.id, value, changed):
                yield target.id


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    for target, value in (pair for each in node.body for pair in _assigned(each)):
        if isinstance(value, DISPLAYS) and not ast.unparse(target).isupper():
            yield f"{node.name}.{ast.unparse(target)}"


def _assigned(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(statement, ast.Assign):
        yield from ((target, statement.value) for target in statement.targets)
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign) and statement.value is not None:
        yield statement.target, statement.value


def _may_change(name: str, value: ast.expr, changed: set[str]) -> bool:
    if name == "__all__":
        return False
    if isinstance(value, DISPLAYS):
        return name in changed or not name.isupper()
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func).rpartition(".")[2]
        return called in CHANGING or not (name.isupper() or called in CONSTANTS)
    return False


def _changed_names(tree: ast.Module) -> Iterator[str]:
    """The variables that code of the module writes into."""
    for node in ast.walk(tree):
        is_written = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        if is_written or (isinstance(node, ast.Attribute) and node.attr in CHANGES):
            yield ast.unparse(node.value)


def _of_the_process(node: ast.AST) -> Iterator[str]:
    """Assignments to a module or object of the process: `os.environ[...]`, `sys.excepthook`."""
    targets: Iterable[ast.expr] = ()
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("os.environ."):
        targets = [node.func] if ast.unparse(node.func).rpartition(".")[2] in CHANGES else ()
    for target in targets:
        name = ast.unparse(target).partition("[")[0]
        if name.partition(".")[0] in OF_THE_PROCESS and name not in OF_THE_PROCESS:
            yield "os.environ" if name.startswith("os.environ") else name


def _cached(tree: ast.Module) -> Iterator[str]:
    """The functions of the module, not those within a call, whose results are kept."""
    bodies = [tree.body, *(each.body for each in tree.body if isinstance(each, ast.ClassDef))]
    for node in (each for body in bodies for each in body):
        if isinstance(node, ast.FunctionDef):
            names = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
            if {name.rpartition(".")[2] for name in names} & CACHES:
                yield node.name


def kept_by_modules() -> set[str]:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith(LEFT_OUT):
            tree = ast.parse(file.read_text())
            found |= {f"{path}: {each}" for each in state(tree, caches=not path.startswith(PURE))}
    return found


def test_modules_keep_nothing_that_changes() -> None:
    found = kept_by_modules()
    assert not found - ALLOWED.keys(), "give it to the installation, by the session or the engine"
    assert not ALLOWED.keys() - found, "it is gone: take it out of the list"


@pytest.mark.parametrize(
    "source",
    [
        "CALLS = Counter()",
        "warned = set()",
        "SEEN = {}\ndef f(x):\n    SEEN[x] = 1",
        "SEEN = []\ndef f(x):\n    SEEN.append(x)",
        "EDGES: 'weakref.WeakKeyDictionary[int, int]' = weakref.WeakKeyDictionary()",
        "here = threading.local()",
        "here = Thread()",
        "starts = itertools.count()",
        "current: ContextVar[int] = ContextVar('current')",
        "last = None\ndef f():\n    global last\n    last = 1",
        "@cache\ndef mesh(): ...",
        "class A:\n    @functools.lru_cache(maxsize=None)\n    def f(self): ...",
        "class A:\n    kept = []",
        "LIBRARY = torch.library.Library('mine', 'DEF')",
        "LIBRARY.define('product(Tensor x) -> Tensor')",
        "Slice.run = run",
        "def f():\n    os.environ['A'] = 'b'",
        "def f():\n    os.environ.setdefault('A', 'b')",
        "def f():\n    sys.excepthook = g",
        "def f():\n    torch.nn.Module.__call__ = g",
    ],
)
def test_state_of_a_module_is_found(source: str) -> None:
    assert list(state(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "logger = logging.getLogger('shardcore')",
        "_T = TypeVar('_T')",
        "__all__ = ['a']",
        "_NAMES = {'a': 1}\ndef f(x):\n    return _NAMES[x]",
        "PATTERN = re.compile('a')",
        "SIZE = BlockSize(1)",
        "def f():\n    seen = {}\n    seen[1] = 2",
        "def f():\n    @cache\n    def whole(): ...",
        "@attrs.define\nclass A:\n    kept: dict[str, int] = attrs.field(factory=dict)",
        "def f(environ):\n    return os.environ.get('A')",
    ],
)
def test_constants_of_a_module_pass_the_check(source: str) -> None:
    assert not list(state(ast.parse(source)))
