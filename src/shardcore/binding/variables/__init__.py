"""Variables of Keras and parameters of torch modules: how they are stored and adopted.

Import the functions of `variable`, `initial`, `adoption`, `quantized` and `torch_state`.
"""
