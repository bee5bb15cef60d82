"""Redistribution of sharded tensors: import the functions of `redistribution`."""
