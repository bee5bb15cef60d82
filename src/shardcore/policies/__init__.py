"""Policies, which choose the layouts of variables. `builtin_plugins` imports each `plan`."""
