"""Variables of Keras and parameters of torch modules: how they are stored and adopted."""
