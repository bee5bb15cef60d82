"""The search of policy `auto`: traces of a model under several layouts, and their prices.

`auto` imports `search.search`; `estimating` imports `traces.reinstall`.
"""
