"""The code that Keras calls, by seam; `seams` has the private Keras names. `api` imports it."""
