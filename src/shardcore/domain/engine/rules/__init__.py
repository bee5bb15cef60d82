"""Sharding rules of operators, independent of any library: import the functions of each module."""
