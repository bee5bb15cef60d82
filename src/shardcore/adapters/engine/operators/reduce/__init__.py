"""Operators along dims: reductions, softmax, statistics."""
