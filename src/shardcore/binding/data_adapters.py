"""Seam: the data adapters. They read the data of one process; the step takes its rows."""


class OneProcess:
    """What stands in for the module `distribution_lib` inside `keras.src.trainers.data_adapters`.

    Keras' own check refuses NumPy arrays, generators and loaders in several processes, and splits
    a `tf.data.Dataset` itself. shardcore splits every batch at the step instead, whatever it comes
    from, so the adapters see one process.
    """

    def distribution(self) -> None:
        """No distribution."""
        return
