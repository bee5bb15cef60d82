"""Variables of Keras and parameters of torch modules, and the operations that are replaced."""
