"""Analysis of a model's layers for the policies: linear layers, pairs and sequence roles.

Policies import the function or class that each module is about.
"""
