"""Operators that move elements or dims and compute nothing: views, slices, joins, shifts.

The rules are in `domain.rules.movement`. The planners are those of `views` and `slicing`.
"""
