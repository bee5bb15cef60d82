"""Environments with other releases of torch and Keras, in a cache folder outside the checkout."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What the tests need beside torch and Keras, in the versions of constraints.txt.
TOOLS = (
    *("attrs", "cloudpickle", "hypothesis", "numpy", "pandas", "pluggy", "pytest", "pytest-xdist"),
    *("rich", "safetensors"),
)


@dataclass(frozen=True)
class Pair:
    """A release of torch and one of Keras, or "newest"; of Keras also "nightly"."""

    torch: str
    keras: str

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-keras-{self.keras}"

    @property
    def moves(self) -> bool:
        """Whether the same words mean another release tomorrow."""
        return self.torch == "newest" or self.keras in ("newest", "nightly")

    def requirements(self) -> tuple[str, str]:
        """The packages for pip."""
        torch = "torch" if self.torch == "newest" else f"torch=={self.torch}"
        of_keras = {"newest": "keras", "nightly": "keras-nightly"}
        return torch, of_keras.get(self.keras, f"keras=={self.keras}")


def cache() -> Path:
    """The folder of the environments, one for each pair and release of Python."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    python = ".".join(map(str, sys.version_info[:2]))
    return Path(base) / "shardcore" / "compat" / f"python-{python}"


def python_of(pair: Pair) -> Path:
    """The interpreter of the pair's environment, which is made when it is missing.

    Its stamp has what was installed. An environment whose installation was interrupted has none,
    and is completed; so is one that lacks a tool which the tests have come to need.
    """
    folder = cache() / pair.name
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = (*pair.requirements(), *TOOLS)
    if not pair.moves and stamp.exists() and stamp.read_text().split() == list(wanted):
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(_pinned()))
    pip = (python, "-m", "pip", "install", "--disable-pip-version-check", "--upgrade")
    subprocess.run([*pip, "-c", constraints, *wanted], check=True)
    stamp.write_text("\n".join(wanted))
    return python


def site_packages(python: Path) -> Path:
    """The folder of the packages of an environment."""
    return next(python.parents[1].glob("lib/python*/site-packages"))


def _pinned() -> list[str]:
    """The lines of constraints.txt about the tools; torch and Keras choose what they need."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    return [line for line in lines if line.partition("==")[0] in TOOLS]
