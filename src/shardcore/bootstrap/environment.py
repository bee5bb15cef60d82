"""The Keras backend, and the versions of Keras and torch that are installed."""

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version

from shardcore.domain.errors import EnvironmentProblem
from shardcore.reporting.logs import log_of

logger = log_of("install")

# The oldest and the newest release of each package with which the tests were run. A newer one is
# not refused, but checked (ADR 30).
TESTED = {"keras": ("3.13", "3.16"), "torch": ("2.10", "2.15")}
# The names under which the index of packages has nightly builds.
NIGHTLY = {"keras": "keras-nightly"}


def choose_backend() -> bool:
    """Sets the Keras backend to torch, if none is chosen.

    Returns:
        Whether it set `KERAS_BACKEND`.

    Raises:
        EnvironmentProblem: If another backend is chosen or loaded.
    """
    keras = sys.modules.get("keras")
    backend = keras.backend.backend() if keras else os.environ.get("KERAS_BACKEND")
    if backend is None:
        os.environ["KERAS_BACKEND"] = "torch"
        logger.debug("KERAS_BACKEND was not set: Keras will run on torch")
        return True
    if backend != "torch":
        raise EnvironmentProblem(
            f"shardcore is for Keras on PyTorch, but the backend is {backend!r}: set "
            'KERAS_BACKEND=torch in the environment (or os.environ["KERAS_BACKEND"] = "torch") '
            "before Keras is imported.",
            name="KERAS_BACKEND",
            got=repr(backend),
        )
    return False


def check_versions() -> list[str]:
    """Checks Keras and torch; has a sentence for each that is newer than the tested releases.

    Raises:
        EnvironmentProblem: If Keras or torch is missing, or older than the tested releases.
    """
    newer = []
    for package, (oldest, newest) in TESTED.items():
        installed = package_version(package)
        if installed is None or importlib.util.find_spec(package) is None:
            raise EnvironmentProblem(
                f"shardcore needs {package} {oldest} or newer, and it is not installed: "
                f"pip install {package}."
            )
        if _release(installed) < _release(oldest):
            raise EnvironmentProblem(
                f"shardcore needs {package} {oldest} or newer, but {installed} is installed: "
                f"pip install '{package}>={oldest}'."
            )
        if _release(installed) > _release(newest):
            newer.append(
                f"{package} {installed} is newer than {newest}, the newest tested release."
            )
    return newer


@contextmanager
def keras_imported() -> Iterator[None]:
    """Opens a context in which Keras is imported.

    Raises:
        EnvironmentProblem: If Keras and torch cannot be imported together.
    """
    try:
        yield
    except ImportError as error:
        raise EnvironmentProblem(
            f"Keras {package_version('keras')} cannot be imported with torch "
            f"{package_version('torch')}: {error}. From 3.16 on, Keras needs a torch that has "
            "torch.distributed.tensor: install one, or keras<3.16."
        ) from error


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def package_version(package: str) -> str | None:
    """Finds the version of a package or of its nightly build; None if neither is installed.

    Both install into one folder: if both are there, the release may be overwritten.
    """
    imported = getattr(sys.modules.get(package), "__version__", None)
    if imported is not None:
        return str(imported)
    for name in (NIGHTLY.get(package, package), package):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def versions() -> dict[str, str | None]:
    """Lists the versions of Python, of shardcore, and of the packages that it works with."""
    packages = ("shardcore", "keras", "torch", "numpy")
    return {"python": platform.python_version()} | {
        package: package_version(package) for package in packages
    }
