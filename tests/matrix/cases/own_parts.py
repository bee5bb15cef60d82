"""Layers, optimizers, metrics, losses and schedules as people write them."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.matrix.cases.classifier import CLASSES, FEATURES, Rng, adam, labels, reals
from tests.matrix.parity import Case

L, ops = keras.layers, keras.ops
STEPS, SIDE = 6, 8


# --- layers ---------------------------------------------------------------------------------------


class Quantized(L.Layer):
    """The nearest vector of a codebook, which follows what comes; the gradient passes through."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(shape[-1], 7), initializer="orthogonal", name="codes")
        self.used = self.add_weight(shape=(7,), initializer="zeros", trainable=False, name="used")

    def call(self, x: Any, training: bool = False) -> Any:
        flat = ops.reshape(x, (-1, ops.shape(x)[-1]))
        far = (
            ops.sum(flat**2, axis=1, keepdims=True)
            + ops.sum(self.codes**2, axis=0)
            - 2 * ops.matmul(flat, self.codes)
        )
        chosen = ops.one_hot(ops.argmin(far, axis=1), 7)
        found = ops.reshape(ops.matmul(chosen, ops.transpose(self.codes)), ops.shape(x))
        self.add_loss(0.1 * ops.mean((found - ops.stop_gradient(x)) ** 2))
        if training:
            self.used.assign(0.9 * self.used + 0.1 * ops.sum(chosen, axis=0))
        return x + ops.stop_gradient(found - x)


class Experts(L.Layer):
    """Each row goes to its two best experts."""

    def build(self, shape: Any) -> None:
        size = shape[-1]
        self.gate = L.Dense(4, use_bias=False)
        self.gate.build(shape)
        self.kernels = self.add_weight(shape=(4, size, size), initializer="glorot_uniform")

    def call(self, x: Any) -> Any:
        shares = ops.softmax(self.gate(x), axis=-1)
        best, which = ops.top_k(shares, 2)
        best = best / ops.sum(best, axis=-1, keepdims=True)
        weights = ops.sum(best[..., None] * ops.one_hot(which, 4), axis=-2)
        self.add_loss(0.01 * ops.sum(ops.mean(shares, axis=0) * ops.mean(weights, axis=0)))
        each = ops.einsum("bi,eio->beo", x, self.kernels)
        return ops.sum(each * weights[..., None], axis=1)


class Queue(L.Layer):
    """Keeps the last rows, and compares with them."""

    def build(self, shape: Any) -> None:
        made = {"trainable": False}
        self.rows = self.add_weight(shape=(8, shape[-1]), initializer="zeros", name="rows", **made)
        self.at = self.add_weight(shape=(), initializer="zeros", dtype="int32", name="at", **made)

    def call(self, x: Any, training: bool = False) -> Any:
        rows = ops.copy(self.rows)  # written below
        found = x + 0.1 * ops.matmul(ops.tanh(ops.matmul(x, ops.transpose(rows))), rows)
        if training:
            mean = ops.mean(ops.stop_gradient(x), axis=0, keepdims=True)
            start = [ops.convert_to_tensor(self.at), 0]
            self.rows.assign(ops.slice_update(self.rows, start, mean))
            self.at.assign((self.at + 1) % 8)
        return found


class Cell(L.Layer):
    """A cell for `keras.layers.RNN`."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.state_size = self.output_size = units

    def build(self, shape: Any) -> None:
        size = self.state_size
        self.kernel = self.add_weight(shape=(shape[-1], 2 * size), initializer="glorot_uniform")
        self.recurrent = self.add_weight(shape=(size, 2 * size), initializer="orthogonal")

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        (h,) = states
        gate, new = ops.split(ops.matmul(x, self.kernel) + ops.matmul(h, self.recurrent), 2, -1)
        gate = ops.sigmoid(gate)
        h = gate * h + (1 - gate) * ops.tanh(new)
        return h, [h]


class Looped(L.Layer):
    """`fori_loop`, `while_loop`, `scan` and `cond` of Keras."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="orthogonal")

    def call(self, x: Any) -> Any:
        x = ops.fori_loop(0, 3, lambda i, h: ops.tanh(ops.matmul(h, self.kernel)), x)
        _, x = ops.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, h * 0.9), (0, x))
        carried, each = ops.scan(lambda c, r: (c + r, c * r), ops.zeros_like(x[:, 0]), x.mT)
        x = x + ops.mean(each, axis=0)[:, None] + carried[:, None]
        return ops.cond(ops.sum(ops.ones(2)) > 1, lambda: x * 2, lambda: x)


class Rotated(L.Layer):
    """Queries and keys turned by their place, and linear attention by cumulated sums."""

    def build(self, shape: Any) -> None:
        self.mix = L.EinsumDense("bti,ihe->bthe", (None, 2, 12))
        self.mix.build(shape)
        self.out = L.EinsumDense("bthd,hdo->bto", (None, shape[-1]))
        self.out.build((*shape[:-1], 2, 4))

    def call(self, x: Any) -> Any:
        query, key, value = ops.split(self.mix(x), 3, axis=-1)
        places = ops.cast(ops.arange(ops.shape(x)[1]), "float32")
        angles = places[:, None] * ops.array([1.0, 0.1])
        turn = ops.cos(angles)[:, None], ops.sin(angles)[:, None]
        query, key = self.turned(query, *turn), self.turned(key, *turn)
        query, key = ops.elu(query) + 1, ops.elu(key) + 1
        sums = ops.cumsum(ops.einsum("bthd,bthe->bthde", key, value), axis=1)
        norm = ops.einsum("bthd,bthd->bth", query, ops.cumsum(key, axis=1))
        found = ops.einsum("bthd,bthde->bthe", query, sums) / norm[..., None]
        return x + self.out(found)

    @staticmethod
    def turned(x: Any, cos: Any, sin: Any) -> Any:
        one, other = ops.split(x, 2, axis=-1)
        return ops.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


class Graph(L.Layer):
    """Messages along edges, added up at nodes."""

    def build(self, shape: Any) -> None:
        self.sources = np.array([0, 1, 2, 3, 4, 5, 0, 2], "int32")
        self.targets = np.array([1, 2, 3, 4, 5, 0, 3, 5], "int32")
        self.dense = L.Dense(shape[-1], activation="relu")
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        sent = self.dense(ops.take(x, self.sources, axis=1))
        nodes = ops.transpose(sent, (1, 0, 2))
        got = ops.segment_sum(nodes, ops.convert_to_tensor(self.targets), num_segments=STEPS)
        return x + ops.transpose(got, (1, 0, 2))


class Standardized(L.Conv2D):
    """A convolution whose kernel is standardized in each call."""

    def call(self, x: Any) -> Any:
        kernel = ops.convert_to_tensor(self.kernel)
        mean, variance = ops.moments(kernel, axes=(0, 1, 2), keepdims=True)
        kernel = (kernel - mean) / ops.sqrt(variance + 1e-3)
        return ops.conv(x, kernel, strides=1, padding="same") + self.bias


class Generated(L.Layer):
    """A small network writes the weights that rows meet."""

    def build(self, shape: Any) -> None:
        self.size = shape[-1]
        self.writes = L.Dense(self.size * self.size)
        self.writes.build(shape)

    def call(self, x: Any) -> Any:
        kernels = ops.reshape(self.writes(x), (-1, self.size, self.size))
        return x + 0.1 * ops.einsum("bi,bio->bo", x, kernels)


class Patches(L.Layer):
    """Pictures as rows of patches, with a place each and a row for the class."""

    def build(self, shape: Any) -> None:
        self.places = L.Embedding(17, 8)
        self.places.build(None)
        self.dense = L.Dense(8)
        self.dense.build((None, None, 12))
        self.class_row = self.add_weight(shape=(1, 1, 8), initializer="random_normal")

    def call(self, x: Any) -> Any:
        x = ops.image.extract_patches(x, (2, 2))
        x = self.dense(ops.reshape(x, (ops.shape(x)[0], -1, x.shape[-1])))
        first = ops.broadcast_to(self.class_row, (ops.shape(x)[0], 1, 8))
        x = ops.concatenate([first, x], axis=1)
        return x + self.places(ops.arange(ops.shape(x)[1]))


class Moved(L.Layer):
    """Pictures are sampled where a network says."""

    def build(self, shape: Any) -> None:
        self.moves = L.Conv2D(2, 3, padding="same", kernel_initializer="random_normal")
        self.moves.build(shape)

    def call(self, x: Any) -> Any:
        rows, high, wide = ops.shape(x)[0], x.shape[1], x.shape[2]
        grid = ops.meshgrid(ops.arange(high), ops.arange(wide), indexing="ij")
        at = ops.cast(ops.stack(grid, axis=-1), "float32")[None] + 0.5 * self.moves(x)
        batch = ops.broadcast_to(
            ops.reshape(ops.cast(ops.arange(rows), "float32"), (-1, 1, 1)), (rows, high, wide)
        )
        where = ops.stack([batch, at[..., 0], at[..., 1]], axis=0)
        each = [ops.image.map_coordinates(x[..., c], where, 1, "nearest") for c in range(3)]
        return ops.stack(each, axis=-1)


class StochasticDepth(L.Layer):
    """Rows that leave a branch out, and another rate."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.seeds = rate, keras.random.SeedGenerator(3)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
        kept = ops.floor(1 - self.rate + keras.random.uniform(shape, seed=self.seeds))
        return x / (1 - self.rate) * kept


class Spectral(L.Layer):
    """Weights on frequencies."""

    def build(self, shape: Any) -> None:
        size = shape[1] // 2 + 1
        self.real = self.add_weight(shape=(size, shape[-1]), initializer="ones")
        self.imaginary = self.add_weight(shape=(size, shape[-1]), initializer="zeros")

    def call(self, x: Any) -> Any:
        real, imaginary = ops.rfft(ops.transpose(x, (0, 2, 1)))
        a, b = ops.transpose(self.real), ops.transpose(self.imaginary)
        found = ops.irfft((real * a - imaginary * b, real * b + imaginary * a))
        return ops.transpose(found, (0, 2, 1))


class Straight(L.Layer):
    """A custom gradient."""

    def call(self, x: Any) -> Any:
        @ops.custom_gradient
        def rounded(x: Any) -> Any:
            def grad(*args: Any, upstream: Any = None) -> Any:
                upstream = args[0] if upstream is None else upstream
                return upstream * ops.cast(ops.abs(x) < 1, x.dtype)

            return ops.round(x * 4) / 4, grad

        return rounded(x)


class Watched(L.Layer):
    """Running statistics, and a loss that depends on them."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.count.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            self.mean.assign(self.mean + (ops.mean(x, axis=0) - self.mean) / self.count * 4)
            self.add_loss(0.01 * ops.sum(ops.square(x - self.mean)) / ops.size(x))
        return x - self.mean


# --- what `compile` takes -------------------------------------------------------------------------


class Momentum(keras.optimizers.Optimizer):
    """Signs of a momentum, with a state for each variable and one for all."""

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.moments = self.add_optimizer_variables(variables, "moment")
        self.largest = self.add_variable(shape=(), name="largest")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        moment = self.moments[self._get_variable_index(variable)]
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign(moment, 0.9 * moment + 0.1 * ops.cast(gradient, variable.dtype))
        size = ops.sqrt(ops.mean(ops.square(moment))) + 1e-3
        self.assign(self.largest, ops.maximum(self.largest, size))
        self.assign_sub(variable, rate * moment / size)


class Warmed(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that rises, and falls as a cosine."""

    def __call__(self, step: Any) -> Any:
        step = ops.cast(step, "float32")
        rises = step / 4
        falls = 0.5 * (1 + ops.cos(math.pi * ops.minimum(step / 20, 1.0)))
        return 0.05 * ops.where(step < 4, rises, falls)

    def get_config(self) -> dict[str, Any]:
        return {}


class Branching(Warmed):
    """The same with an `if` of Python."""

    def __call__(self, step: Any) -> Any:
        return 0.02 if step < 3 else 0.01


class Confusion(keras.metrics.Metric):
    """A table of counts; its result is worked out of it."""

    def __init__(self) -> None:
        super().__init__(name="confusion")
        self.counts = self.add_variable((CLASSES, CLASSES), initializer="zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        true = ops.one_hot(ops.cast(ops.reshape(y_true, (-1,)), "int32"), CLASSES)
        found = ops.one_hot(ops.argmax(y_pred, axis=-1), CLASSES)
        if sample_weight is not None:
            true = true * ops.reshape(ops.cast(sample_weight, true.dtype), (-1, 1))
        self.counts.assign_add(ops.matmul(ops.transpose(true), found))

    def result(self) -> Any:
        right = ops.diagonal(self.counts)
        return ops.mean(right / (ops.sum(self.counts, axis=1) + 1e-6))


class Focal(keras.losses.Loss):
    """A loss that weighs what is hard, with temperatures."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        chosen = ops.one_hot(ops.cast(y_true, "int32"), CLASSES)
        logs = ops.log_softmax(y_pred / 0.7, axis=-1)
        share = ops.sum(chosen * ops.exp(logs), axis=-1)
        return -((1 - share) ** 2) * ops.sum(chosen * logs, axis=-1)


class Ranked(keras.losses.Loss):
    """All pairs of rows of the global batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        score = ops.mean(y_pred, axis=-1)
        truth = ops.cast(ops.reshape(y_true, (-1,)), "float32")
        above = ops.cast(truth[:, None] > truth[None, :], "float32")
        apart = ops.softplus(-(score[:, None] - score[None, :]))
        return ops.sum(above * apart, axis=1) / (ops.sum(above) + 1.0)


class Orthogonal(keras.regularizers.Regularizer):
    def __call__(self, x: Any) -> Any:
        return 0.01 * ops.sum(ops.square(ops.matmul(ops.transpose(x), x) - ops.eye(x.shape[1])))


class Sums(keras.constraints.Constraint):
    def __call__(self, w: Any) -> Any:
        return w / ops.maximum(ops.sum(ops.abs(w), axis=0, keepdims=True), 1.0)


# --- models ---------------------------------------------------------------------------------------


def flat(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, FEATURES), labels(rng, rows)


def series(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, STEPS, 4), labels(rng, rows)


def pictures(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, SIDE, SIDE, 3), labels(rng, rows)


Batch = Callable[[Rng, int], tuple[Any, ...]]
_SHAPES: dict[Batch, tuple[int, ...]] = {
    flat: (FEATURES,),
    series: (STEPS, 4),
    pictures: (SIDE, SIDE, 3),
}


def case(
    name: str,
    batch: Batch,
    part: Callable[[], Any] | None = None,
    compile_with: Callable[[], dict[str, Any]] = dict,
    **dense: Any,
) -> Case:
    """A classifier with `part` in it, or compiled with one."""

    def build() -> Any:
        x = keras.Input(_SHAPES[batch])
        h = L.Dense(8, activation="tanh", **{k: v() for k, v in dense.items()})(x)
        if part is not None:
            h = part()(x if batch is pictures else h)
        while len(h.shape) > 2:
            h = ops.mean(h, axis=1)
        model = keras.Model(x, L.Dense(CLASSES)(h))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            **{"optimizer": adam(), "loss": loss, "metrics": ["accuracy"], **compile_with()}
        )
        return model

    return Case(name, build, batch)


OWN_PARTS = [
    case("quantized", flat, Quantized),
    case("experts", flat, Experts),
    case("queue", flat, Queue),
    case("cell", series, lambda: L.RNN(Cell(6), return_sequences=True)),
    case("cell stacked", series, lambda: L.RNN([Cell(6), L.GRUCell(5)])),
    case("looped", flat, Looped),
    case("rotated", series, Rotated),
    case("graph", series, Graph),
    case("standardized", pictures, lambda: Standardized(6, 3, padding="same")),
    case("generated", flat, Generated),
    case("patches", pictures, Patches),
    case("moved", pictures, Moved),
    case("stochastic depth", flat, lambda: StochasticDepth(0.4)),
    case("spectral", series, Spectral),
    case("straight", flat, Straight),
    case("watched", flat, Watched),
    case("optimizer", flat, None, lambda: {"optimizer": Momentum(0.01)}),
    case("schedule", flat, None, lambda: {"optimizer": keras.optimizers.SGD(Warmed())}),
    case(
        "branching schedule", flat, None, lambda: {"optimizer": keras.optimizers.SGD(Branching())}
    ),
    case(
        "metric", flat, None, lambda: {"metrics": [Confusion()], "weighted_metrics": [Confusion()]}
    ),
    case("loss", flat, None, lambda: {"loss": Focal()}),
    case("ranked", flat, None, lambda: {"loss": Ranked(reduction="sum")}),
    case("regularizer", flat, None, dict, kernel_regularizer=Orthogonal),
    case("constraint", flat, None, dict, kernel_constraint=Sums),
]
