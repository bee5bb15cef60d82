"""The collectives of a step: their reasons, and how to avoid them."""
