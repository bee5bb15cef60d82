"""Training by `fit` of Keras: plain, under shardcore, or on JAX."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
from attrs import frozen

from benchmarks import cases
from benchmarks.cases import ADAM_EPSILON, LEARNING_RATE, MEGATRON, Case
from benchmarks.training import Fitting

AXES = ("data", "model")


def train(
    case: Case, layout: str, device: str, strategy: str | None = None, **compile_arguments: Any
) -> "KerasTraining":
    """A model that is ready for its first step.

    Args:
        case: What is trained.
        layout: "whole" sets no distribution.
        device: Where it is trained: Keras has chosen the same by itself.
        strategy: What shardcore is installed with; None leaves Keras alone.
        **compile_arguments: How `compile` is to run the step.
    """
    if strategy is not None:
        import shardcore

        shardcore.install(strategy)
    if layout != "whole":
        distribution = _distribution(case, layout)
        keras.distribution.set_distribution(distribution)
    model = case.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE, epsilon=ADAM_EPSILON), loss, **compile_arguments
    )
    return KerasTraining(case, model, layout)


def _distribution(case: Case, layout: str) -> Any:
    if layout == "data parallel":
        return keras.distribution.DataParallel()
    ranks = keras.distribution.get_device_count()
    shape = (1, ranks) if layout == "megatron" else (ranks, 1)
    mesh = keras.distribution.DeviceMesh(shape, AXES)
    layout_map = keras.distribution.LayoutMap(mesh)
    if layout == "megatron":
        for path, axes in MEGATRON.items():
            layout_map[path] = axes
    else:
        import shardcore

        layout_map = shardcore.plan(case.build, mesh, "fully_sharded")
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")


@frozen(eq=False)
class KerasTraining(Fitting):
    """`fit` over arrays."""

    case: Case
    model: keras.Model
    layout: str

    def losses(self, steps: int) -> list[float]:
        return self._fit(1, epochs=steps).history["loss"]

    def epoch(self, steps: int) -> float:
        watch = Stopwatch()
        self._fit(steps, callbacks=[watch])
        return watch.seconds / steps

    def program(self, epochs: int) -> float:
        """Returns the seconds of a fit with validation, a smaller last batch and four callbacks."""
        x, y = self.case.data(self.case.steps)
        held_out = x[: 2 * self.case.batch + 1], y[: 2 * self.case.batch + 1]
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="shardcore-bench-") as folder:
            callbacks = [
                keras.callbacks.EarlyStopping(patience=epochs),
                keras.callbacks.ReduceLROnPlateau(patience=1),
                keras.callbacks.ModelCheckpoint(
                    f"{folder}/best.weights.h5", "val_loss", 0, True, True
                ),
                keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            ]
            self.model.fit(
                x[:-1], y[:-1], self.case.batch, epochs, verbose=0, callbacks=callbacks,
                validation_data=held_out,
            )  # fmt: skip
        return time.perf_counter() - began

    def waiting(self, steps: int, source: str) -> float:
        # Here: the environment of Keras on JAX has neither torch nor shardcore.
        from benchmarks import clocks
        from shardcore.binding.trainer_run import Prefetch

        x, y = self.case.data(steps)
        device = str(keras.ops.convert_to_tensor(0.0).device).partition(":")[0]
        data: dict[str, Any] = {"x": x, "y": y, "batch_size": self.case.batch}
        if source != "arrays":
            data = {"x": clocks.loader(x, y, self.case.batch, device)}
        clock = clocks.Clock(device)
        step = self.model.train_function

        def timed(batch: Any) -> Any:
            with clock.step():
                return step(batch)

        draw = clock.outside(Prefetch.fill)  # a step of shardcore ends by it
        with (
            mock.patch.object(self.model, "train_function", timed),
            mock.patch.object(Prefetch, "fill", draw),
        ):
            self.model.fit(**data, shuffle=False, verbose=0)
        return clock.share()

    def kept(self) -> Iterator[Any]:
        for variable in [*self.model.variables, *self.model.optimizer.variables]:
            yield variable._value.detach()

    def share(self) -> int:
        return cases.share(self.trainable(), self.layout, keras.distribution.get_device_count())

    def trainable(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what is trained, by path."""
        return {v.path: tuple(v.shape) for v in self.model.trainable_variables}

    def layer_calls(self) -> int:
        """Counts the layers that a step calls in Python: none in a captured step."""
        call = keras.Layer.__call__
        calls = []

        def counting(layer: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(layer)
            return call(layer, *args, **kwargs)

        with mock.patch.object(keras.Layer, "__call__", counting):
            self.epoch(1)
        return len(calls)

    def _fit(self, steps: int, **options: Any) -> Any:
        x, y = self.case.data(steps)
        return self.model.fit(x, y, batch_size=self.case.batch, shuffle=False, verbose=0, **options)


class Stopwatch(keras.callbacks.Callback):
    """From the beginning of an epoch to its end, when its loss has been read.

    It looks at no batch: what no callback reads need not be summed over the ranks.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self._began
