"""Writes into sharded tensors, and into the views of them."""
