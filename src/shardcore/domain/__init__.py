"""The rules of sharding as pure data: meshes, placements, layouts, redistribution, operators.

Every other folder may import all of it; it imports no torch, no Keras and nothing of shardcore.
"""
