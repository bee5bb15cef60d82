"""Passes that move, join and repeat collectives."""
