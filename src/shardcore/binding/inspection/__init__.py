"""The functions behind `shardcore.explain()` and `shardcore.verify()`.

Import `explain.explain_model`, `verify.verify_model`, `traced_step` and `without_values`.
"""
