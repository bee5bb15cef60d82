"""Programs that train in `mixed_float16`, in which gradients overflow in some steps."""

import logging
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import torch

import shardcore
from shardcore.adapters import torch_private
from tests import cuda_graph
from tests.distributed.capture.steps import Spy, calls
from tests.distributed.programs import AXES, DEVICE, IS_ON_GPU

O = keras.optimizers  # noqa: E741 - as in tests/matrix
INNER = {
    "adam": lambda: O.Adam(1e-2),
    "momentum": lambda: O.SGD(1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "schedule": lambda: O.RMSprop(
        O.schedules.CosineDecay(1e-3, 9, warmup_steps=4, warmup_target=1e-2), global_clipnorm=0.5
    ),
    "accumulation": lambda: O.Adam(
        1e-2,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_overwrite_frequency=3,
        weight_decay=0.01,
        clipnorm=1.0,
    ),
}
# The steps whose batch has a feature whose gradient overflows in the last row of a kernel, which
# one rank stores; and those with a row that is no number.
OVERFLOWS, HAS_NAN = (0, 4), (9,)
STEPS = 12
# The step from which on the program runs.
CAPTURED = 2


# In inference mode `item` arrives as it is, elsewhere as the other.
READS = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}


class HostReads(torch_private.OperatorListener):
    """Counts the numbers that torch reads on the host; a step in a mode of a user runs eagerly."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.count = 0

    def _note(self, operator: Any, _args: Any, _kwargs: Any) -> None:
        self.count += operator in READS


def distribute(strategy: str | None, shape: tuple[int, ...] | None) -> None:
    """Installs a strategy, unless it is plain Keras, and shards the two kernels over all ranks."""
    if strategy:
        shardcore.install(strategy)
    if shape is not None:
        axis = AXES[shape.index(max(shape))]
        layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, AXES))
        layout_map[".*first/kernel"] = (axis, None)
        layout_map[".*last/kernel"] = (None, axis)
        keras.distribution.set_distribution(
            keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
        )


def compiled(inner: Any, jit: Any, width: int = 16) -> keras.Model:
    """A model whose optimizer scales its loss; its last kernel has a constraint."""
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(1)
    first = keras.layers.Dense(width, activation="relu", name="first")
    limit = keras.constraints.MaxNorm(1.0)
    last = keras.layers.Dense(4, kernel_constraint=limit, name="last")
    model = keras.Sequential([keras.Input((8,)), Spy(), first, last])
    optimizer = O.LossScaleOptimizer(inner, initial_scale=2.0**10, dynamic_growth_steps=3)
    model.compile(optimizer, "mse", jit_compile=jit)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(8, 8)).astype("float32"), rng.normal(size=(8, 4)).astype("float32")
    if step in OVERFLOWS:
        x[:, 7] = 6e4
    if step in HAS_NAN:
        x[1] = np.nan
    return torch.as_tensor(x, device=DEVICE), torch.as_tensor(y, device=DEVICE)


def forget_last_feature(model: keras.Model) -> None:
    """Sets the last row of the first kernel to zero: outputs do not overflow with the gradient."""
    kernel = model.get_layer("first").kernel
    row = keras.ops.arange(8)[:, None]
    kernel.assign(keras.ops.where(row < 7, kernel, 0.0))


def state(model: keras.Model) -> dict[str, Any]:
    optimizer = model.optimizer
    kept = [*model.trainable_variables, *optimizer.variables]
    values = {f"{at} {each.path}": each.numpy() for at, each in enumerate(kept)}
    return values | {"steps": int(optimizer.iterations)}


def train(
    _rank: int, strategy: str | None, shape: Any, names: Any = INNER, jit: Any = "auto"
) -> dict[str, Any]:
    """By inner optimizer: the state after each step, and the host reads of each.

    Then how often the model's Python ran.
    """
    distribute(strategy, shape)
    found = {}
    for name in names:
        model = compiled(INNER[name](), jit)
        calls.clear()
        states, reads = [], []
        for step in range(STEPS):
            if step in OVERFLOWS:
                forget_last_feature(model)
            with HostReads() as counted:
                model.train_on_batch(*batch(step))
            states.append(state(model))
            reads.append(counted.count)
        found[name] = states, reads, len(calls)
    return found


def said_of(subject: str) -> list[str]:
    """Returns the list of the messages of a subject from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger(f"shardcore.{subject}")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    return said


def graphs() -> Any:
    """A context in which there are CUDA graphs."""
    return nullcontext() if IS_ON_GPU else cuda_graph.on_cpu()
