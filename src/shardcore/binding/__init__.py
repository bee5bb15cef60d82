"""Where Keras calls us: one module per seam, and `seams`, where every private name stands."""
