"""Operators that look up elements, rows and classes; norms over the last dims."""
