"""Packages of plug-ins, for the tests of this folder."""

import sys

import pytest


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on the path; what is written there by `write_package` counts as installed."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)
