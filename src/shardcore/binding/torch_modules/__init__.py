"""Torch modules: laid out alone, and wrapped in a Keras layer."""
