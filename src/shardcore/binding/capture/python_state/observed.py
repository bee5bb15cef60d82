"""The functions that the steps of a model call: those that are read as the user's code is."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import attrs

from shardcore.binding.capture.python_state import code_facts, rules
from shardcore.binding.capture.python_state.known_modules import is_effect, is_standard
from shardcore.binding.capture.python_state.objects import is_of_c, name_of
from shardcore.binding.capture.python_state.thread_profile import open_profile
from shardcore.domain.capture import NotCaptured
from shardcore.ports.capture import Observer

_PASSED_LOOKUPS = frozenset(f"<built-in method builtins.{name}>" for name in code_facts.LOOKUPS)
_LOGGING = ("logging", "absl.logging")
_WRITES = frozenset(
    f"<method {name!r} of '_io.TextIOWrapper' objects>" for name in ("write", "writelines")
)
# Methods of a logger that write nothing.
_ASK = frozenset({"isEnabledFor", "getEffectiveLevel", "getChild", "getLogger"})


@attrs.define(eq=False)
class ObservedCalls:
    """The functions that steps have called.

    cProfile knows who calls a function, except after a function of torch has run in the caller: a
    call of an unknown caller counts as the user's.
    """

    has_imported: bool = attrs.field(default=False, init=False)  # a module, in the last step
    _codes: dict[int, CodeType] = attrs.field(factory=dict, init=False)
    count: int = attrs.field(default=0, init=False)  # functions of Python, noted; it never falls
    # The user's code; other code and functions of C that something else than a library may have
    # called.
    _called_outside: dict[object, Any] = attrs.field(factory=dict, init=False)  # by `_key`
    # What the user's code calls, as far as the profile knows.
    _called_by_users: set[Any] = attrs.field(factory=set, init=False)
    _known_names: dict[CodeType, code_facts.Names] = attrs.field(factory=dict, init=False)
    _looked_up: code_facts.LookedUp = attrs.field(factory=dict, init=False)

    @contextmanager
    def observe(self) -> Iterator[Observer]:
        """Notes what this thread calls while the observer is enabled."""
        with code_facts.noted_lookups(self._looked_up), open_profile() as profile:
            yield profile
        self._note(profile.getstats())

    def _note(self, stats: Iterable[Any]) -> None:
        entries = list(stats)
        self.has_imported = any(
            getattr(entry.code, "co_name", "") == "_find_and_load_unlocked" for entry in entries
        )
        collector = [getattr(callback, "__code__", None) for callback in gc.callbacks]
        by_library = self._calls_by_libraries(entries)
        for entry in entries:
            code = entry.code
            if code in collector or code_facts.is_module_body(code):
                continue
            if isinstance(code, CodeType) and id(code) not in self._codes:
                self._codes[id(code)] = code
                self.count += 1
            if entry.callcount > by_library.get(_key(code), 0) or code_facts.is_users(code):
                self._called_outside[_key(code)] = code
            if code_facts.is_users(code):
                self._called_by_users.update(call.code for call in entry.calls or ())

    def _calls_by_libraries(self, entries: Sequence[Any]) -> dict[Any, int]:
        """Counts the calls by libraries, and by the modules of Python that they call.

        Such a module counts as theirs if they alone call its function.
        """
        counts: dict[Any, int] = {}
        others = [entry for entry in entries if not code_facts.is_trusted(entry.code)]
        trusted = [entry for entry in entries if code_facts.is_trusted(entry.code)]
        while trusted:
            for call in (call for entry in trusted for call in entry.calls or ()):
                key = _key(call.code)
                counts[key] = counts.get(key, 0) + call.callcount
            trusted = [
                entry
                for entry in others
                if entry.callcount <= counts.get(_key(entry.code), 0)
                and not code_facts.is_users(entry.code)
            ]
            known = set(map(id, trusted))
            others = [entry for entry in others if id(entry) not in known]
        return counts

    def forget(self) -> None:
        """Drops all that was noted."""
        self._codes.clear()
        self._called_outside.clear()
        self._called_by_users.clear()
        self._looked_up.clear()

    def has_called(self, code: CodeType) -> bool:
        """Looks up the code among that of all steps."""
        return id(code) in self._codes

    def modules_called(self) -> frozenset[str]:
        """Collects the modules whose functions were called."""
        return frozenset(map(code_facts.module_of, self._codes.values()))

    def users(self) -> list[CodeType]:
        """Lists the code that is read: the user's, and that of unknown modules."""
        return [
            code
            for code in self._called_outside.values()
            if isinstance(code, CodeType) and not code_facts.is_known(code)
        ]

    def names_of(self, code: CodeType) -> code_facts.Names:
        """Reads the names in code once."""
        if code not in self._known_names:
            self._known_names[code] = code_facts.Names.of(code)
        return self._known_names[code]

    def makes_text(self) -> bool:
        """Tells whether the user's code may turn functions, classes and locks into text."""
        return any(self.names_of(code).makes_text for code in self.users())

    def called_of(self, module: str) -> frozenset[str]:
        """Collects the functions of a Python module that the user's code may have called."""
        called = filter(code_facts.is_python, self._called_outside.values())
        return frozenset(code.co_name for code in called if code_facts.module_of(code) == module)

    def makes_objects(self) -> bool:
        """Tells whether the user's code may have made objects of classes of a library."""
        names = self.user_names()
        called = filter(code_facts.is_python, self._called_outside.values())
        made = [code for code in called if code.co_name in ("__init__", "__new__")]
        return any(
            code in self._called_by_users or code.co_qualname.rpartition(".")[0] in names
            for code in made
            if code_facts.is_known(code)
        )

    def check_calls(self) -> None:
        """Checks that the user's code and functions of C read nothing that cannot be seen.

        Raises:
            NotCaptured: If one may.
        """
        for names in map(self.names_of, self.users()):
            for name in sorted(names.attributes & rules.REFUSED_ATTRIBUTES):
                raise NotCaptured(
                    f"{names.location} reads {name}, which no guard compares: {rules.remedy(name)}"
                )
        # Functions of Python first: they have better names than those of C that they call.
        for code in sorted(self._called_outside.values(), key=lambda code: isinstance(code, str)):
            if isinstance(code, str):
                why, name = rules.why_unknown(code), code
                if rules.is_setting(code) and not self._is_named(code, rules.bare_name(code)):
                    why = ""  # a library asks for it where the profile does not know the caller
            else:
                name = f"{code_facts.module_of(code).partition('.')[0]}.{code.co_qualname}"
                is_refused = name in rules.REFUSED_FUNCTIONS and (
                    name not in rules.USED_BY_LIBRARIES or self._is_named(code, code.co_name)
                )
                unseen = f"calls {name}(), which reads or sets what no guard compares"
                why = unseen if is_refused else ""
            if why:
                raise NotCaptured(f"{self.caller_of(name)} {why}: {rules.remedy(name)}")

    def check_function(self, function: Any) -> None:
        """Checks a function of C that other C code may call, as `map(os.access, paths)` does.

        Raises:
            NotCaptured: If it may read what no guard compares.
        """
        name = name_of(function)
        if why := rules.why_unknown(name):
            raise NotCaptured(f"{self.caller_of(name)} {why}: {rules.remedy(name)}")

    def check_class(self, kind: type) -> None:
        """Checks a class of C, which code may make and iterate over: `io.FileIO(path)`.

        A subclass of tuple, as `sys.version_info` has, is allowed: it holds its members alone.

        Raises:
            NotCaptured: If it may read what no guard compares.
        """
        name = f"{kind.__module__}.{kind.__qualname__}"
        if is_of_c(kind) and not issubclass(kind, tuple) and not rules.is_known_class(name):
            raise NotCaptured(
                f"{self.caller_of(name)} uses {name}, a class of C that may read anything: "
                f"{rules.remedy(name)}"
            )

    def _is_named(self, function: object, name: str) -> bool:
        names = (self.names_of(code).attributes for code in self.users())
        return function in self._called_by_users or any(name in attributes for attributes in names)

    def caller_of(self, function: str) -> str:
        """Finds the first user function that names `function`, and its line."""
        for code in self.users():
            names = self.names_of(code)
            if any(name in function for name in names.attributes if len(name) > 2):
                return names.location
        return "the step"

    def attribute_names(self) -> frozenset[str] | None:
        """Collects all names of attributes in the code that ran; None if some are not known.

        A call of Python's own `getattr` was not noted: it was passed to the code.
        """
        are_known = all(self.names_of(code).are_complete for code in self.users())
        if not are_known or not self._called_by_users.isdisjoint(_PASSED_LOOKUPS):
            return None
        names = set(self.user_names())
        for code in self._codes.values():
            names.update(code.co_names, code.co_freevars)
            names.update(constant for constant in code.co_consts if isinstance(constant, str))
        return frozenset(names)

    def user_names(self) -> frozenset[str]:
        """Collects the names in the user's code, and those that it has looked up."""
        users = self.users()
        in_code = [self.names_of(code).attributes for code in users]
        return frozenset().union(*in_code, *map(self._names_looked_up, users))

    def passed_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """Collects the variables and attributes that the user's code may pass to code of C.

        The profile does not see what functions of C call: `map(os.access, paths)`.
        """
        users = self.users()
        names = [self.names_of(code) for code in users]
        looked_up = map(self._names_looked_up, users)
        variables = frozenset().union(*(of_code.passed_variables for of_code in names))
        attributes = (of_code.passed_attributes for of_code in names)
        return variables, frozenset().union(*attributes, *looked_up)

    def _names_looked_up(self, code: CodeType) -> set[str]:
        return self._looked_up.get(id(code), (code, set[str]()))[1]

    def prints(self) -> bool:
        """Tells whether the user's code prints."""
        return "<built-in method builtins.print>" in self._called_outside

    def standard_functions(self) -> dict[str, set[CodeType]]:
        """Collects the functions that ran of modules of the standard library, by module.

        Not those of modules whose calls are effects, which a captured step does not repeat.
        """
        called = filter(code_facts.is_python, self._called_outside.values())
        modules = set(map(code_facts.module_of, called))
        functions: dict[str, set[CodeType]] = {}
        for code in self._codes.values():
            module = code_facts.module_of(code)
            if module in modules and is_standard(module) and not is_effect(module):
                functions.setdefault(module, set()).add(code)
        return functions

    def effects(self) -> list[str]:
        """Lists what the user's code does that a captured step does not repeat."""
        # A level that is asked for is no message, nor is one that the level leaves out.
        of_user, all_called = (
            {code.co_name for code in codes if code_facts.module_of(code) in _LOGGING}
            for codes in (
                filter(code_facts.is_python, self._called_outside.values()),
                self._codes.values(),
            )
        )
        is_logging = "makeRecord" in all_called and not of_user <= _ASK
        is_writing = not _WRITES.isdisjoint(self._called_by_users)
        return (
            ["prints"] * self.prints()
            + ["log messages"] * is_logging
            + ["writes to files"] * is_writing
        )


def _key(code: object) -> object:
    return id(code) if isinstance(code, CodeType) else code
