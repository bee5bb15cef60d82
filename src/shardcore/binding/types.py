"""Types that all folders of `binding` use: they belong to none, and import none of it."""

import io
import os
from collections.abc import Callable
from typing import Any

import keras
import torch

from shardcore.ports.strategy import Strategy

# A function of Keras, which a patch replaces.
Original = Callable[..., Any]

TorchStrategy = Strategy[torch.Tensor]

Distribution = keras.distribution.DataParallel | keras.distribution.ModelParallel

# A seed, as random functions and layers take one.
Seed = int | keras.random.SeedGenerator | None

# A file, as saving functions take one.
FilePath = str | os.PathLike[str] | io.IOBase
