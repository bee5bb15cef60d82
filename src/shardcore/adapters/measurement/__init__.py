"""Measurement of what a step moves, computes and holds, and of this machine. It imports `job`."""
