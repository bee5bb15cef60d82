"""The time that a lane has."""

import os
import sys

from tests.compat import lanes

SLOW = """
import time

def test_quick():
    pass

def test_slow():
    time.sleep(600)
"""


def test_a_lane_that_takes_too_long_is_ended_and_says_so(tmp_path):
    test = tmp_path / "test_slow.py"
    test.write_text(SLOW)
    found = lanes.outcome(sys.executable, [str(test)], dict(os.environ), tmp_path, limit=2)
    assert "not all of it ran in 2 s" in found["failed"]
