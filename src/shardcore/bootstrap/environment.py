"""The Keras backend, and the versions of Keras and torch that are installed."""

import importlib.util
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from shardcore.domain.errors import EnvironmentProblem

logger = logging.getLogger("shardcore.install")

# The releases that the seam table and the torch compat module are written for.
KNOWN = {"keras": "3.15", "torch": "2.13"}


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
            "before Keras is imported."
        )
    return False


def check_versions() -> None:
    """Raises an EnvironmentProblem unless known versions of Keras and torch are installed."""
    for package, known in KNOWN.items():
        found = package_version(package)
        if found is None or importlib.util.find_spec(package) is None:
            raise EnvironmentProblem(
                f"shardcore needs {package} {known}, and it is not installed: "
                "pip install 'shardcore[torch]'."
            )
        if found.split("+")[0].split(".")[:2] != known.split("."):
            raise EnvironmentProblem(
                f"shardcore knows {package} {known}, but {found} is installed, whose internal "
                f"names may have moved: pip install '{package}=={known}.*', or look for a newer "
                "shardcore."
            )


def package_version(package: str) -> str | None:
    """Returns the version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, of shardcore, and of the packages that it works with."""
    packages = ("shardcore", "keras", "torch", "numpy")
    return {"python": platform.python_version()} | {
        each: package_version(each) for each in packages
    }
