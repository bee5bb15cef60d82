"""Sharded tensors as plain slices and explicit collectives, without `torch.distributed.tensor`.

`tensor` says what a slice is, `moves` how it is brought into another layout, `operators` what
becomes of an operator on slices, and `library` is the port that a strategy is written against.
"""
