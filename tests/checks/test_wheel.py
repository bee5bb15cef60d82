"""The built wheel is complete, and works where the repository is not."""

import email
import zipfile
from pathlib import Path

import pytest

from tests.checks.tree import ROOT, Tree, python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what is packaged, without network."""
    tree = Tree.copy_to(tmp_path_factory.mktemp("tree"))
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    python("-m", "pip", "wheel", *options, "-w", str(out), ".", cwd=tree.root)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it; found before the repository's own package."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "--disable-pip-version-check")
    python("-m", "pip", "install", *options, "--target", str(target), str(wheel), cwd=target)
    return target


def text_of(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = (ROOT / "src").rglob("*")
    expected = {
        file.relative_to(ROOT / "src").as_posix()
        for file in sources
        if file.is_file() and file.suffix != ".pyc"
    }
    assert packed == expected
    assert "shardcore/py.typed" in packed


def test_wheel_carries_the_license(wheel: Path) -> None:
    assert text_of(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert email.message_from_string(text_of(wheel, "METADATA"))["License-Expression"] == (
        "Apache-2.0"
    )


def test_core_needs_no_torch_and_the_extra_does(wheel: Path) -> None:
    needs = email.message_from_string(text_of(wheel, "METADATA")).get_all("Requires-Dist", [])
    core = {need.split(">")[0] for need in needs if "extra ==" not in need}
    assert core == {"attrs", "pluggy", "rich"}
    extra = {need.split("<")[0].split(">")[0] for need in needs if "extra == 'torch'" in need}
    assert extra == {"keras", "numpy", "torch"}


def test_wheel_installs_the_command(wheel: Path) -> None:
    assert "shardcore = shardcore.cli:main" in text_of(wheel, "entry_points.txt")


def test_installed_wheel_imports_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    program = "import shardcore; print(shardcore.__file__, shardcore.__version__)"
    file, version = python("-c", program, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert Path(file).is_relative_to(installed)
    (metadata,) = installed.glob("shardcore-*.dist-info")
    assert metadata.name == f"shardcore-{version}.dist-info"


def test_installed_command_answers(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "shardcore"
    assert "usage" in python(str(script), "--help", cwd=tmp_path, PYTHONPATH=str(installed)).lower()
