"""What the functions of `test_captured_names` import."""

RATE = 1.0
FACTOR = 1.0
