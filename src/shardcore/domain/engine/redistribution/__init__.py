"""Redistributions as data: the steps from one layout to another, and exchanges of elements.

Import `plan.plan`, `exchange.Exchange`, `segments.stages` and the other functions of `segments`.
"""
