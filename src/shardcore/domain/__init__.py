"""Meshes, layouts, redistribution and rules as pure data. Every folder may import all of it."""
