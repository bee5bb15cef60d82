"""Processes that this one starts: ranks for `launch`, and one that plans."""
