"""Analysis of a model's layers for the policies: linear layers, pairs and sequence roles."""
