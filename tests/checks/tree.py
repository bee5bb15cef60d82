"""A copy of the tree to plant violations in, and tools run in it for real."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
PACKAGED = ("pyproject.toml", "README.md", "LICENSE")


@attrs.frozen
class Tree:
    """A copy of the files that are linted and packaged."""

    root: Path

    @classmethod
    def copy_to(cls, root: Path) -> "Tree":
        """Copies the package and its configuration, without caches."""
        shutil.copytree(
            ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
        for name in PACKAGED:
            shutil.copy(ROOT / name, root / name)
        return cls(root)

    def plant(self, path: str, source: str) -> None:
        """Writes one module, and an `__init__` for each of its packages that has none."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        package = file.parent
        while package.name != "src":
            if not (package / "__init__.py").exists():
                (package / "__init__.py").write_text('"""A package."""\n')
            package = package.parent
        file.write_text(source)

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs an installed command line tool on this tree instead of the installed package."""
        return subprocess.run(
            [str(SCRIPTS / script), *arguments],
            cwd=self.root,
            env={"PYTHONPATH": str(self.root / "src"), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def python(*arguments: str, cwd: Path, **env: str) -> str:
    """Runs this interpreter elsewhere with nothing but `env`; gives what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
