"""The Keras and the torch that are here: the backend, and whether the versions are known."""

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
    """See to it that Keras runs on torch.

    Returns:
        Whether `KERAS_BACKEND` was set for it, which was not set before.

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
    """Raise an EnvironmentProblem unless Keras and torch are there, in versions we know."""
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
    """The version of an installed package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """The versions of Python, of shardcore, and of the packages that it works with."""
    packages = ("shardcore", "keras", "torch", "numpy")
    return {"python": platform.python_version()} | {
        each: package_version(each) for each in packages
    }
