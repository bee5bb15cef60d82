"""Operators that reduce along dims: sums, softmax, statistics, argmax."""
