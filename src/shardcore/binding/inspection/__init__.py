"""The functions behind `shardcore.explain()` and `shardcore.verify()`."""
