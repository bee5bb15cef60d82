"""Meshes, layouts, rules, steps and machines as pure data. Every folder may import all of it."""
