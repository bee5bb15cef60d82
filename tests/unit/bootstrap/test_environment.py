"""The versions of Keras and torch: missing, too old, tested, newer."""

import sys

import pytest

from shardcore import bootstrap
from shardcore.bootstrap import environment
from shardcore.domain.errors import EnvironmentProblem


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package of a version, as the only one that shardcore asks for."""

    def install(package, version, distribution=None):
        name = distribution or package
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (metadata / "METADATA").write_text(described)
        monkeypatch.setattr(environment, "TESTED", {package: ("3.9", "3.15")})

    monkeypatch.syspath_prepend(tmp_path)
    return install


@pytest.mark.parametrize("package", ["keras", "torch"])
def test_a_package_that_is_missing(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(environment, "TESTED", {package: environment.TESTED[package]})
    with pytest.raises(
        EnvironmentProblem, match=rf"needs {package} .*not installed: pip install {package}"
    ):
        bootstrap.install("auto", {})


@pytest.mark.parametrize("version", ["3.8.1", "2.20", "3.1.5+cu130"])
def test_a_version_that_is_too_old(installed, version):
    installed("library", version)
    with pytest.raises(EnvironmentProblem) as error:
        environment.check_versions()
    assert str(error.value) == (
        f"shardcore needs library 3.9 or newer, but {version} is installed: "
        "pip install 'library>=3.9'."
    )


@pytest.mark.parametrize("version", ["3.9.0", "3.10.0.dev20251101", "3.15.7+cpu"])
def test_a_tested_version_needs_no_word(installed, version):
    installed("library", version)
    assert environment.check_versions() == []


@pytest.mark.parametrize("version", ["3.16.0", "3.16.0.dev20261124", "3.150.0", "4.0"])
def test_a_newer_version_gets_a_sentence(installed, version):
    installed("library", version)
    expected = f"library {version} is newer than 3.15, the newest tested release."
    assert environment.check_versions() == [expected]


def test_a_nightly_build_of_keras_is_found_under_its_other_name(installed, monkeypatch):
    monkeypatch.setattr(environment, "NIGHTLY", {"library": "library-nightly"})
    installed("library", "3.16.0.dev1", "library-nightly")
    assert environment.package_version("library") == "3.16.0.dev1"
    assert environment.package_version("another") is None


def test_a_nightly_build_counts_where_both_are_installed(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "NIGHTLY", {"library": "library-nightly"})
    installed("library", "3.16.0.dev1", "library-nightly")
    (tmp_path / "library").rename(tmp_path / "overwritten")
    installed("library", "3.15.1")
    assert environment.package_version("library") == "3.16.0.dev1"
