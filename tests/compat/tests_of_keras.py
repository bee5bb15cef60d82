"""The tests that Keras has for itself: some wheels have none, and get those of its repository."""

import io
import os
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

# KERAS_REPOSITORY may be a clone, for a machine that reaches no other.
REPOSITORY = "https://github.com/keras-team/keras"
TEST_FILES = ":(glob)keras/src/**/*_test.py"


def add(site_packages: Path) -> None:
    """Adds the test files to the Keras in a folder of packages; if they cannot be had, says so."""
    source = site_packages / "keras" / "src"
    version = re.findall(r'__version__ = "(.*)"', (source / "version.py").read_text())[0]
    added = source / "added_tests"  # the version of which this has added tests
    old = added.read_text() if added.exists() else None
    if old == version or (old is None and any(source.rglob("*_test.py"))):
        return
    # A nightly build is of the day, as is the branch.
    revision = "HEAD" if ".dev" in version else f"refs/tags/v{version}"
    try:
        archive = _archive(os.environ.get("KERAS_REPOSITORY", REPOSITORY), revision)
    except subprocess.CalledProcessError as error:
        print(f"No tests of Keras {version}: {error.stderr.decode().strip()}", flush=True)
        return
    for file in source.rglob("*_test.py"):  # of an older build
        file.unlink()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(site_packages, filter="data")
    added.write_text(version)


def _archive(repository: str, revision: str) -> bytes:
    """Returns the test files of a revision, as an archive of tar."""
    with tempfile.TemporaryDirectory() as folder:
        git = ("git", "-C", folder)
        for command in (("init", "--quiet"), ("fetch", "--depth=1", repository, revision)):
            subprocess.run([*git, *command], check=True, capture_output=True)
        made = ("archive", "FETCH_HEAD", TEST_FILES)
        return subprocess.run([*git, *made], check=True, capture_output=True).stdout
