"""The warning of a GPU that has no units for the dtype of a model."""

import attrs
import torch
from keras import Model

from shardcore.binding import keras_private
from shardcore.reporting.logs import log_of

logger = log_of("training")

# The first compute capability of CUDA devices with units for bfloat16: that of an A100.
_WITH_BFLOAT16 = (8, 0)


@attrs.define(eq=False)
class EmulationWarning:
    """Warns once of models that compute in bfloat16 on a GPU without units for it.

    torch says that such a GPU supports bfloat16: it computes in float32, and rounds.
    """

    _was_given: bool = attrs.field(default=False, init=False)

    def check(self, model: Model) -> None:
        """Warns if a layer of `model` computes so, on such a GPU."""
        if self._was_given or "cuda" not in str(keras_private.torch_device()):
            return
        capability = torch.cuda.get_device_capability()
        layers = keras_private.layers_of(model)
        layer = next((layer for layer in layers if layer.compute_dtype == "bfloat16"), None)
        if capability >= _WITH_BFLOAT16 or layer is None:
            return
        self._was_given = True
        logger.warning(
            "Layer %r of model %r computes in bfloat16, which %s (compute capability %d.%d) only "
            "emulates. Use its units for float16: "
            "keras.config.set_dtype_policy('mixed_float16') before the model is built.",
            layer.name,
            model.name,
            torch.cuda.get_device_name(),
            *capability,
        )
