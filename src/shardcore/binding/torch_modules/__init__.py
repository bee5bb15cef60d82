"""Torch modules: laid out alone, and wrapped in a Keras layer.

Import `parallelize.parallelize` and the functions of `wrapper`.
"""
