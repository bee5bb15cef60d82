"""Constants that the functions of `test_captured_names` import; two modules import each other."""

from tests.distributed.capture import stale_settings

RATE = 1.0
FACTOR = 1.0
__all__ = ["FACTOR", "RATE", "stale_settings"]
