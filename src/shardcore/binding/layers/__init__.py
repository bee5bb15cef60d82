"""The calls of layers and the operations that shardcore replaces."""
