"""How sharded tensors come to other layouts, and where they are found once they are there."""
