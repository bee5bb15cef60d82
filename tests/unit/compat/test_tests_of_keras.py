"""A Keras whose wheel has no tests gets those of its repository."""

import subprocess

import pytest

from tests.compat import tests_of_keras


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a test file in release 3.13.2, and with another one since."""
    folder = tmp_path / "repository"
    source = folder / "keras" / "src"
    source.mkdir(parents=True)

    def git(*command):
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", "-C", folder, *name, *command], check=True, capture_output=True)

    git("init")
    for test, commands in (("old", [("tag", "v3.13.2")]), ("new", [])):
        (source / f"{test}_test.py").touch()
        (source / "no_tests.py").touch()
        for command in (("add", "."), ("commit", "-m", test), *commands):
            git(*command)
    monkeypatch.setenv("KERAS_REPOSITORY", str(folder))


def installed(site_packages, version, *files):
    source = site_packages / "keras" / "src"
    source.mkdir(parents=True, exist_ok=True)
    (source / "version.py").write_text(f'__version__ = "{version}"\n')
    for name in files:
        (source / name).touch()
    tests_of_keras.add(site_packages)
    return {each.name for each in source.glob("*_*.py")}


def test_a_release_gets_the_tests_of_its_tag_and_a_nightly_build_those_of_the_branch(
    repository, tmp_path
):
    assert installed(tmp_path / "a", "3.13.2") == {"old_test.py"}
    assert installed(tmp_path / "a", "3.16.0.dev2026102704") == {"old_test.py", "new_test.py"}
    assert installed(tmp_path / "a", "3.13.2") == {"old_test.py"}


def test_a_wheel_with_tests_keeps_its_own(repository, tmp_path):
    assert installed(tmp_path, "3.15.1", "own_test.py") == {"own_test.py"}


def test_a_version_that_the_repository_lacks_is_said(repository, tmp_path, capsys):
    assert installed(tmp_path, "3.12.4") == set()
    assert capsys.readouterr().out.startswith("No tests of Keras 3.12.4: fatal: ")
