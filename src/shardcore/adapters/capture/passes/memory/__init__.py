"""Passes that save copies and memory."""
