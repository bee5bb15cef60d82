"""Files that Keras writes: models, weights, exports, and those of callbacks."""
