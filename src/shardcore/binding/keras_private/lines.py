"""The lines of Keras that shardcore knows, and the names that moved between them.

The rest of the package names everything as Keras 3.15 does; `here` finds it in the Keras that is
installed.
"""

import pkgutil
from typing import Any

import keras

# The line of the Keras that is installed: (3, 15) for 3.15.1, (3, 16) for a nightly of 3.16.
LINE = tuple(int(number) for number in keras.__version__.split(".")[:2])

# The line that moved a name -> the start of the name before, and since.
MOVED = {
    (3, 16): {
        "keras.src.backend.torch.math": "keras.src.backend.torch.ops.math",
        "keras.src.backend.torch.core": "keras.src.backend.torch.ops.core",
        "keras.src.backend.torch.nn": "keras.src.backend.torch.ops.nn",
        "keras.src.backend.torch.numpy": "keras.src.backend.torch.ops.numpy",
        "keras.src.backend.torch.trainer:TorchTrainer._should_torch_compile": (
            "keras.src.backend.torch.trainer:Trainer._use_torch_compile"
        ),
        "keras.src.backend.torch.trainer:TorchTrainer": "keras.src.backend.torch.trainer:Trainer",
        "keras.src.trainers.trainer:Trainer": "keras.src.trainers.trainer:BaseTrainer",
    }
}


def here(name: str, line: tuple[int, ...] = LINE) -> str:
    """Translates `name`, a module, a colon, and a name in it, to that of `line` of Keras.

    Example:
        >>> here("keras.src.backend.torch.core:scatter", line=(3, 15))
        'keras.src.backend.torch.core:scatter'
        >>> here("keras.src.backend.torch.core:scatter", line=(3, 16))
        'keras.src.backend.torch.ops.core:scatter'
    """
    for since, moved in MOVED.items():
        for before, after in moved.items():
            if line >= since and name.startswith(before):
                return name.replace(before, after, 1)
    return name


def find(name: str) -> Any:
    """Imports the module, class or function `name` of the Keras that is installed."""
    return pkgutil.resolve_name(here(name))
