"""How sharded tensors come to other layouts."""
