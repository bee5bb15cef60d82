"""Policies, which choose the layout of each variable from a model's facts and a mesh.

They import `domain` and `ports` only. `builtin_plugins` imports the function `plan` of each policy.
"""
