"""The job: its process group, its store, the exchange of values, and ranks that are forked.

All of `adapters`, and the public functions, may import each of its modules.
"""
