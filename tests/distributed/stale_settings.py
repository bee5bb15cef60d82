"""What the functions of `test_captured_names` import; it knows a module that knows it."""

from tests.distributed import stale_constants

SHARE = 1.0
__all__ = ["SHARE", "stale_constants"]
