"""What an optimizer of Keras keeps of its variables."""

from collections.abc import Sequence
from typing import Any

from keras.src.backend.torch.optimizers import torch_adam

ADAM = torch_adam.__name__  # imported above: Keras does not before the first Adam is made


def moments_of(optimizer: Any, variables: Sequence[Any]) -> tuple[list[Any], ...]:
    """The tensors that an `Adam` keeps: first and second moments, and the largest second ones.

    The last list is empty, unless the optimizer has `amsgrad`.
    """
    kept = [optimizer._momentums, optimizer._velocities]
    kept.append(optimizer._velocity_hats if optimizer.amsgrad else [])
    places = [optimizer._get_variable_index(each) for each in variables]
    return tuple([each[place].value for place in places] if each else [] for each in kept)
