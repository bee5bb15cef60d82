"""Files that Keras writes: models, weights, exports, and those of callbacks.

`install` imports what replaces the functions of Keras; `checkpoints` takes
`callbacks.write_on_all_ranks`.
"""
