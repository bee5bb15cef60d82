"""Ranks that are not forked: new interpreters of this host, and the engines of a notebook."""
