"""The state that a new interpreter takes over from the process that starts it."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from shardcore import bootstrap
from shardcore.domain.errors import EnvironmentProblem, describe_error

if TYPE_CHECKING:
    from shardcore.adapters.ranks.job.started_ranks import Case, Workspace
    from shardcore.adapters.ranks.launch.payload import Rules, Written

_FILE = "start.pickle"


@attrs.frozen(eq=False)
class StartMessage:
    """The start of a new interpreter: with it, it is like the process that started it.

    Args:
        case: The work, without function and arguments, which are read last.
        workspace: The environment and the files of the ranks.
        search_path: `sys.path`.
        program: `sys.argv`.
        folder: The working folder.
        variables: What the environment of the other process has and this one's lacks, or has as
            another; None for one that it lacks.
        installed: The strategy and the options with which shardcore is installed; None if not.
        process: Generators and settings.
        keras: Settings, policy and seeds of Keras; None if it is not loaded.
        written: What else was written.
    """

    case: "Case[Any]"
    workspace: "Workspace"
    search_path: list[str]
    program: list[str]
    folder: str
    variables: dict[str, str | None]
    installed: tuple[str, dict[str, Any]] | None
    process: Any
    keras: Any
    written: "Written"

    @staticmethod
    def write(call: str, case: "Case[Any]", workspace: "Workspace", rules: "Rules") -> None:
        """Writes what ranks take over, and what they run, into the folder of `workspace`.

        Raises:
            EnvironmentProblem: If something may not or cannot be sent. It names the variable.
        """
        import cloudpickle

        from shardcore.adapters.ranks.launch import payload
        from shardcore.adapters.ranks.launch.process_state import ProcessState

        objects = _custom_objects()
        try:
            written = payload.write(
                workspace.folder, (objects, case.function, case.arguments), rules
            )
        except Exception as error:  # noqa: BLE001 - whatever the values of the user raise
            named = {"the function": case.function}
            named |= payload.arguments_of(case.function, case.arguments)
            if objects is not None:
                named |= {f"custom object {name!r}": of for name, of in objects.by_name.items()}
            raise payload.not_sent(call, named, rules, error) from None
        sent = StartMessage(
            attrs.evolve(case, function=_placeholder, arguments=()),
            workspace,
            list(sys.path),
            list(sys.argv),
            str(Path.cwd()),
            {"PYTHONPATH": os.environ.get("PYTHONPATH")},
            _installed(),
            ProcessState.now(),
            keras_state(names=case.keeps_session),
            written,
        )
        (workspace.folder / _FILE).write_bytes(cloudpickle.dumps(sent))

    @staticmethod
    def read(folder: Path) -> "StartMessage":
        """Reads the message for this process; `take_over` reads the function and its data."""
        import pickle

        # The folder is a temporary one of the user, which no other user may enter.
        sent: StartMessage = pickle.loads((folder / _FILE).read_bytes())
        return sent

    def take_over(self) -> "Case[Any]":
        """Makes this process like the one that started it; returns the work."""
        sys.path[:] = self.search_path
        sys.argv[:] = self.program
        os.chdir(self.folder)
        for name, value in self.variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._install()
        objects, function, arguments = self._read()
        if objects is not None:
            objects.restore()
            self.keras.restore()
        self.process.restore()
        return attrs.evolve(self.case, function=function, arguments=arguments)

    def _install(self) -> None:
        """Installs shardcore, which takes the device of this rank, before anything is read."""
        if self.installed is not None:
            bootstrap.install(*self.installed)
        elif self.process.torch is not None:
            from shardcore.adapters.ranks.processes import TorchProcesses

            TorchProcesses().take_device()
        if self.keras is not None:
            self.keras.restore_settings()

    def _read(self) -> list[Any]:
        from shardcore.adapters.ranks.launch import payload

        try:
            values = payload.read(self.workspace.folder, self.written)
        except (ImportError, AttributeError) as error:
            raise EnvironmentProblem(
                "A new process could not read the function and its data: it imports what they "
                f"have from modules by its name, and there: {describe_error(error)}. "
                "Define it in the program or in a cell, or in a module that can be imported."
            ) from error
        _make_main(values[1])
        return values


def _placeholder() -> None:
    """Stands for a function that is not read yet."""


def keras_state(*, names: bool = False) -> Any:
    """Reads the state of Keras, with its counts of names if asked; None if it is not loaded."""
    if "keras" not in sys.modules:
        return None
    from shardcore.binding.keras_private.process import KerasState

    return KerasState.now(names=names)


def _custom_objects() -> Any:
    if "keras" not in sys.modules:
        return None
    from shardcore.binding.keras_private.process import CustomObjects

    return CustomObjects.now()


def _installed() -> tuple[str, dict[str, Any]] | None:
    if not bootstrap.is_installed():
        return None
    installed = bootstrap.installation()
    return installed.entry.name, installed.options


def _make_main(function: object) -> None:
    """Makes what the function reads of the program the `__main__` of this process.

    Processes that are forked from it, such as the workers of a DataLoader, exchange objects by the
    names of their classes.
    """
    names: dict[str, Any] = getattr(function, "__globals__", {})
    if names.get("__name__") == "__main__":
        main = ModuleType("__main__")
        vars(main).update({**names, "__builtins__": __builtins__})
        sys.modules["__main__"] = main
