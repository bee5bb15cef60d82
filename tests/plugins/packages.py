"""Packages that offer plug-ins, for tests."""

import subprocess
import sys
from pathlib import Path

TOY = Path(__file__).parent / "toy-strategy"


def pip_install(source: Path, target: Path) -> Path:
    """Builds and installs a package for real, without network; gives the folder to import from."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", target, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def write_package(folder: Path, name: str, source: str) -> None:
    """A package as pip leaves it: one module, and metadata with an entry point for shardcore."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[shardcore]\nplugin = {module}\n")
