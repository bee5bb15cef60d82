"""Where Keras calls us: one module per seam, and `seams`, the one table of every name touched."""
