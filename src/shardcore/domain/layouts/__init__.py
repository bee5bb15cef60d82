"""Meshes, layouts and specs, and the rules that give a layout to each variable.

Import the classes of `mesh`, `layout` and `spec`, and `paths.rules.PathRules`.
"""
