"""Machines as data: the speed of their devices, their links, and the seconds of a collective.

Import `machine.Machine`, `machine.known_machines` and, from `collective_cost`, `Link` and `Costs`.
"""
