"""A model while its program runs, and the callbacks that a program may have."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import keras
import numpy as np

from tests.fuzz import models

if TYPE_CHECKING:
    from tests.fuzz.programs import Program


@attrs.define
class Life:
    """A model while its program runs.

    Args:
        program: The program.
        model: The model, compiled.
        folder: Of the files that it writes, the same on all ranks.
        is_distributed: Whether shardcore is installed.
        draw: Draws the data.
        numbers: Arrays by name: what was computed until now.
        count: How many events there were.
    """

    program: "Program"
    model: Any
    folder: Path
    is_distributed: bool
    draw: np.random.Generator = attrs.field(factory=lambda: np.random.default_rng(11))
    numbers: dict[str, np.ndarray] = attrs.field(factory=dict)
    count: int = 0

    def note(self, nest: Any, kind: str) -> None:
        """Keeps the numbers in a nest of tensors and arrays."""
        for leaf in keras.tree.flatten(nest):
            name = f"number {len(self.numbers)}, event {self.count} ({kind})"
            self.numbers[name] = np.array(keras.ops.convert_to_numpy(leaf))

    def data(self, rows: int) -> tuple[Any, ...]:
        return models.data(self.program, self.draw, rows)

    @property
    def state(self) -> list[Any]:
        """The variables of the model and of its optimizer."""
        return [*self.model.variables, *self.model.optimizer.variables]


_C = keras.callbacks
CALLBACKS: dict[str, Callable[[Life], Any]] = {
    "stops early": lambda life: _C.EarlyStopping(
        "loss", patience=1, min_delta=0.01, restore_best_weights=True
    ),
    "schedules": lambda life: _C.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
    "reduces": lambda life: _C.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=0.1),
    "saves": lambda life: _C.ModelCheckpoint(
        life.folder / f"{life.count}-best.weights.h5",
        monitor="loss",
        save_weights_only=True,
        save_best_only=True,
    ),
    "backs up": lambda life: _C.BackupAndRestore(life.folder / f"{life.count}-backup"),
    "notes batches": lambda life: _C.LambdaCallback(
        on_train_batch_end=lambda batch, logs: life.note(logs, f"batch {batch}")
    ),
    "changes state": lambda life: _C.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: _change(life.model, batch)
    ),
}


def _change(model: Any, batch: int) -> None:
    for layer in model.layers:
        if hasattr(layer, "scale"):
            layer.scale = 1.0 + 0.1 * (batch % 2)
