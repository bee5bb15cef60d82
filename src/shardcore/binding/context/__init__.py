"""The state of a Keras distribution on this process, and what its ranks check together."""
