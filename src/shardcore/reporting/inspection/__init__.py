"""The results of `explain()` and `verify()`, with the picture of a step."""
