"""Settings that the functions of `test_captured_names` import; two modules import each other."""

from tests.distributed.capture import stale_constants

SHARE = 1.0
__all__ = ["SHARE", "stale_constants"]
