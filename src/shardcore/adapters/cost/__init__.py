"""Measurement of what a step computes and holds, and of this machine."""
