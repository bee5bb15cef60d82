"""Redistributions as data: the steps from one layout to another, and exchanges of elements.

Import `plan.plan`, `stages.stages`, `exchange.Exchange` and the functions of `segments`.
"""
