"""The built wheel is complete, and works where the repository is not."""

import email
import json
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.checks.tree import ROOT, Tree, python

TRAINING = """
import shardcore
shardcore.install()
import json
import keras
import numpy as np
mesh = keras.distribution.DeviceMesh((1, 2), ("data", "model"))
layout_map = keras.distribution.LayoutMap(mesh)
layout_map["wide/kernel"] = (None, "model")
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map))
inputs = keras.Input((4,))
model = keras.Model(inputs, keras.layers.Dense(6, name="wide")(inputs))
model.compile("sgd", "mse")
losses = model.fit(np.ones((8, 4)), np.ones((8, 6)), epochs=2, verbose=0).history["loss"]
report = shardcore.verify(model)
if report.rank == 0:
    local = report.variables[0].local_shape
    print(json.dumps([shardcore.__file__, local, report.ok, losses[0] > losses[1]]))
"""


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
    assert core == {"attrs", "cloudpickle", "pluggy", "rich"}
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


def test_installed_wheel_trains_on_two_ranks(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2")
    printed = python(*torchrun, "train.py", cwd=tmp_path, PYTHONPATH=str(installed))
    file, *result = json.loads(printed)
    assert Path(file).is_relative_to(installed)
    assert result == [[4, 3], True, True]


def test_installed_module_is_the_command(installed: Path, tmp_path: Path) -> None:
    words = ("-m", "shardcore", "status", "--json")
    status = json.loads(python(*words, cwd=tmp_path, PYTHONPATH=str(installed)))
    assert (status["strategy"], status["devices"]) == ("dtensor", ["cpu:0"])


def plant_distribution(folder: Path, name: str, version: str) -> None:
    """Writes what pip reads of an installed package."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("pip\n")


def plant_wheel(folder: Path, name: str, version: str) -> None:
    """Writes a wheel of an empty package, which an index would offer."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("extra", "torch"),
    [("", "2.9.1+cu128"), ("[torch]", "2.10.0+cu128"), ("[torch]", "2.11.0+cu128")],
)
def test_pip_replaces_no_torch_and_no_keras(
    wheel: Path, tmp_path: Path, extra: str, torch: str
) -> None:
    """The image of a notebook has a build of torch for its driver; the index offers newer ones."""
    image, index = tmp_path / "image", tmp_path / "index"
    venv.create(image)
    packages = image / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    for name, version in {"torch": torch, "keras": "3.13.2", "numpy": "2.0.2"}.items():
        plant_distribution(packages, name, version)
    index.mkdir()
    small = ("attrs", "cloudpickle", "pluggy", "rich")
    for name in (*small, "keras", "numpy", "torch"):
        plant_wheel(index, name, "99.0")
    options = ("--dry-run", "--quiet", "--report", "-", "--no-index", "--find-links", str(index))
    pip = ("-m", "pip", "--python", str(image / "bin" / "python"), "install", *options)
    report = json.loads(python(*pip, f"shardcore{extra} @ {wheel.as_uri()}", cwd=tmp_path))
    assert {each["metadata"]["name"] for each in report["install"]} == {"shardcore", *small}
