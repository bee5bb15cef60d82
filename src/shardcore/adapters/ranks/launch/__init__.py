"""Ranks that are new interpreters, on a machine where a forked process could not compute."""
