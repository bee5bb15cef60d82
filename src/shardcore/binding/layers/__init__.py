"""The calls of layers and the operations that shardcore replaces.

`install` imports what replaces the functions of Keras, from each module.
"""
