"""Operators that look up elements, rows and classes; layer norms."""
