"""Models that override `train_step`, as people write them for Keras on torch."""

from collections.abc import Callable
from typing import Any

import keras
import torch

from tests.matrix.cases.classifier import CLASSES, Rng, adam, labels, reals
from tests.matrix.parity import Case

L, ops = keras.layers, keras.ops
FEATURES, LATENT, SIDE = 6, 3, 4


def dense(inputs: int | tuple[int, ...], *units: int, activation: str = "tanh") -> Any:
    """Layers of so many units each; the last has no activation."""
    shape = (inputs,) if isinstance(inputs, int) else inputs
    *hidden, last = units
    return keras.Sequential(
        [keras.Input(shape), *(L.Dense(n, activation=activation) for n in hidden), L.Dense(last)]
    )


class OwnStep(keras.Model):
    """The step that most of these cases share."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)
        self.built = True

    def learn(self, loss: Any, weights: Any, optimizer: Any = None) -> None:
        """One step against the gradient of `loss`."""
        self.zero_grad()
        loss.backward()
        gradients = [weight.value.grad for weight in weights]
        with torch.no_grad():
            (optimizer or self.optimizer).apply(gradients, weights)


class Classifies(OwnStep):
    """A classifier, whose `call` is its network's."""

    def __init__(self) -> None:
        super().__init__()
        self.network = dense(FEATURES, 8, CLASSES)
        self.of_rows = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.network(x, training=training)


class Adversaries(OwnStep):
    """A GAN: two networks, each with an optimizer; noisy labels; metrics that Keras resets."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = dense(LATENT, 8, FEATURES, activation="leaky_relu")
        self.judge = keras.Sequential(
            [keras.Input((FEATURES,)), L.Dense(8), L.LeakyReLU(0.2), L.Dropout(0.2), L.Dense(1)]
        )
        self.generator_optimizer = adam()
        self.judged = keras.metrics.Mean(name="judged")
        self.fooled = keras.metrics.Mean(name="fooled")

    @property
    def metrics(self) -> list[Any]:
        return [self.judged, self.fooled]

    def call(self, x: Any) -> Any:
        return self.judge(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        real, *_ = keras.utils.unpack_x_y_sample_weight(data)
        rows = ops.shape(real)[0]
        binary = keras.losses.BinaryCrossentropy(from_logits=True)
        drawn = self.generator(keras.random.normal((rows, LATENT), seed=self.seeds))
        both = ops.concatenate([drawn.detach(), real], axis=0)
        truth = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        truth = truth + 0.05 * keras.random.uniform(ops.shape(truth), seed=self.seeds)
        loss = binary(truth, self.judge(both, training=True))
        self.learn(loss, self.judge.trainable_weights)
        self.judged.update_state(loss)
        noise = keras.random.normal((rows, LATENT), seed=self.seeds)
        loss = binary(ops.zeros((rows, 1)), self.judge(self.generator(noise), training=True))
        self.learn(loss, self.generator.trainable_weights, self.generator_optimizer)
        self.fooled.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


class Variational(OwnStep):
    """An autoencoder with a loss of two terms."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = dense(FEATURES, 8, 2 * LATENT), dense(LATENT, 8, FEATURES)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("rebuilt", "divergence")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def call(self, x: Any) -> Any:
        mean, _ = ops.split(self.encoder(x), 2, axis=-1)
        return self.decoder(mean)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        rebuilt = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        far = ops.mean(ops.sum(ops.square(x - rebuilt), axis=-1))
        each = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        divergence = ops.mean(ops.sum(-0.5 * each, axis=1))
        self.learn(far + 0.1 * divergence, self.trainable_weights)
        for tracker, value in zip(self.trackers, (far, divergence), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Diffusion(OwnStep):
    """Noise is predicted; a second network keeps a moving average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.average = (
            dense(FEATURES + 1, 8, FEATURES),
            dense(FEATURES + 1, 8, FEATURES),
        )
        self.average.set_weights(self.network.get_weights())
        self.normalize = L.Normalization(mean=[0.1] * FEATURES, variance=[2.0] * FEATURES)
        self.noise_loss = keras.metrics.Mean(name="noise_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.noise_loss]

    def call(self, x: Any) -> Any:
        return self.average(ops.concatenate([x, ops.zeros_like(x[:, :1])], axis=-1))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        x = self.normalize(x)
        noises = keras.random.normal(ops.shape(x), seed=self.seeds)
        times = keras.random.uniform((ops.shape(x)[0], 1), seed=self.seeds)
        angles = 0.2 + times * 1.3
        noisy = ops.cos(angles) * x + ops.sin(angles) * noises
        found = self.network(ops.concatenate([noisy, times], axis=-1), training=True)
        loss = ops.mean(ops.abs(found - noises))
        self.learn(loss, self.network.trainable_weights)
        self.noise_loss.update_state(loss)
        for weight, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {"noise_loss": self.noise_loss.result()}


class Distilled(Classifies):
    """A teacher that does not learn is asked by `compute_loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = dense(FEATURES, 16, CLASSES)
        self.teacher.trainable = False

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:
        soft = ops.softmax(self.teacher(x, training=False) / 3.0, axis=1)
        far = keras.losses.KLDivergence()(soft, ops.softmax(y_pred / 3.0, axis=1)) * 9.0
        return 0.1 * self.of_rows(y, y_pred) + 0.9 * far

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self(x, training=True)
        loss = self.compute_loss(x, y, predicted)
        self.learn(loss, self.network.trainable_weights)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(
                y, predicted
            )
        return {metric.name: metric.result() for metric in self.metrics}


class Contrasted(OwnStep):
    """Two views of each picture; each is distinguished from all others of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.augment = keras.Sequential(
            [
                keras.Input((SIDE, SIDE, 3)),
                L.RandomFlip("horizontal", seed=3),
                L.GaussianNoise(0.1, seed=4),
            ]
        )
        self.encoder = keras.Sequential(
            [
                keras.Input((SIDE, SIDE, 3)),
                L.Conv2D(6, 3, activation="relu"),
                L.Flatten(),
                L.Dense(4),
            ]
        )

    def call(self, x: Any) -> Any:
        return self.encoder(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        one, other = (self.encoder(self.augment(x, training=True), training=True) for _ in range(2))
        one, other = ops.normalize(one, axis=1), ops.normalize(other, axis=1)
        alike = ops.matmul(one, ops.transpose(other)) / 0.5
        rows = ops.arange(ops.shape(one)[0])
        both = [alike, ops.transpose(alike)]
        loss = sum(
            keras.losses.sparse_categorical_crossentropy(rows, s, from_logits=True) for s in both
        )
        loss = ops.mean(loss)
        self.learn(loss, self.trainable_weights)
        right = ops.mean(ops.cast(ops.equal(ops.argmax(alike, axis=1), rows), "float32"))
        return {"loss": loss, "right": right}


class Critic(OwnStep):
    """A gradient of a gradient, between real and drawn rows."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = dense(FEATURES, 8, 8, 1)
        self.generator = dense(LATENT, 8, FEATURES)
        self.generator_optimizer = adam()

    def call(self, x: Any) -> Any:
        return self.judge(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        real, *_ = keras.utils.unpack_x_y_sample_weight(data)
        rows = ops.shape(real)[0]
        for _ in range(2):
            drawn = self.generator(keras.random.normal((rows, LATENT), seed=self.seeds)).detach()
            share = keras.random.uniform((rows, 1), seed=self.seeds)
            between = (real + share * (drawn - real)).requires_grad_()
            (slope,) = torch.autograd.grad(self.judge(between).sum(), [between], create_graph=True)
            steep = ops.mean(ops.square(ops.sqrt(ops.sum(ops.square(slope), axis=1)) - 1.0))
            loss = ops.mean(self.judge(drawn)) - ops.mean(self.judge(real)) + 10.0 * steep
            self.learn(loss, self.judge.trainable_weights)
        drawn = self.generator(keras.random.normal((rows, LATENT), seed=self.seeds))
        fooled = -ops.mean(self.judge(drawn))
        self.learn(fooled, self.generator.trainable_weights, self.generator_optimizer)
        return {"judged": loss, "steep": steep, "fooled": fooled}


class Attacked(Classifies):
    """It learns from rows that are moved against it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.of_rows(y, self(x, training=True)), [x])
        x = (x + 0.1 * ops.sign(slope)).detach()
        loss = self.of_rows(y, self(x, training=True))
        self.learn(loss, self.trainable_weights)
        return {"loss": loss}


class Physical(OwnStep):
    """A second derivative of the network's output is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = dense(2, 8, 8, 1)

    def call(self, x: Any) -> Any:
        return self.network(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        at, *_ = keras.utils.unpack_x_y_sample_weight(data)
        at = (at[:, :2] + 0.0).requires_grad_()
        found = self(at, training=True)
        (slope,) = torch.autograd.grad(found.sum(), [at], create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), [at], create_graph=True)
        loss = ops.mean(ops.square(slope[:, 1] - 0.1 * bend[:, 0])) + ops.mean(ops.square(found))
        self.learn(loss, self.trainable_weights)
        return {"loss": loss}


class Accumulated(Classifies):
    """Gradients are added up, and applied at every second step, by values of variables."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [
            self.add_weight(
                shape=weight.shape, trainable=False, initializer="zeros", name=f"sum{n}"
            )
            for n, weight in enumerate(self.network.trainable_weights)
        ]
        self.steps = self.add_weight(
            shape=(), dtype="int32", trainable=False, initializer="zeros", name="steps"
        )

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = self.of_rows(y, self(x, training=True))
        self.zero_grad()
        loss.backward()
        weights = self.network.trainable_weights
        with torch.no_grad():
            self.steps.assign_add(1)
            now = ops.equal(self.steps % 2, 0)
            for total, weight in zip(self.sums, weights, strict=True):
                total.assign_add(weight.value.grad)
                step = ops.where(now, total / 2.0, ops.zeros_like(total))
                weight.assign_sub(0.1 * step)
                total.assign(ops.where(now, ops.zeros_like(total), total))
        return {"loss": loss}


class Clipped(Classifies):
    """torch's own clipping of gradients, in place."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = self.of_rows(y, self(x, training=True))
        self.zero_grad()
        loss.backward()
        weights = self.trainable_weights
        norm = torch.nn.utils.clip_grad_norm_([weight.value for weight in weights], 0.3)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss, "norm": norm}


class SharpnessAware(Classifies):
    """Two passes: weights are moved uphill, and back."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        weights = self.trainable_weights
        self.zero_grad()
        self.of_rows(y, self(x, training=True)).backward()
        with torch.no_grad():
            gradients = [weight.value.grad + 0.0 for weight in weights]
            norm = ops.sqrt(sum(ops.sum(ops.square(each)) for each in gradients)) + 1e-12
            moves = [0.05 * each / norm for each in gradients]
            for weight, move in zip(weights, moves, strict=True):
                weight.assign_add(move)
        self.zero_grad()
        loss = self.of_rows(y, self(x, training=True))
        loss.backward()
        with torch.no_grad():
            for weight, move in zip(weights, moves, strict=True):
                weight.assign_sub(move)
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss, "norm": norm}


class Mixed(Classifies):
    """Rows are mixed with rows of a shuffled batch."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=self.seeds)
        share = keras.random.uniform((), seed=self.seeds)
        x = share * x + (1 - share) * ops.take(x, order, axis=0)
        predicted = self(x, training=True)
        loss = share * self.of_rows(y, predicted)
        loss = loss + (1 - share) * self.of_rows(ops.take(y, order, axis=0), predicted)
        self.learn(loss, self.trainable_weights)
        return {"loss": loss}


class Masked(OwnStep):
    """Patches are drawn, left out, and rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = dense((FEATURES, 4), 8), dense((FEATURES, 8), 8, 4)
        self.attend = L.MultiHeadAttention(2, 4)
        self.attend.build((None, FEATURES, 8), (None, FEATURES, 8))
        self.hole = self.add_weight(shape=(1, 1, 8), initializer="ones", name="hole")

    def call(self, x: Any) -> Any:
        return self.head(self.embed(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        draws = keras.random.uniform(ops.shape(x)[:2], seed=self.seeds)
        order = ops.argsort(draws, axis=1)
        out = order[:, : FEATURES // 2]
        h = self.embed(x)
        is_out = ops.max(ops.one_hot(out, FEATURES), axis=1)[..., None]
        h = (1 - is_out) * h + is_out * self.hole
        found = self.head(self.attend(h, h))
        pairs = [ops.take_along_axis(each, out[..., None], axis=1) for each in (x, found)]
        loss = ops.mean(ops.square(pairs[0] - pairs[1]))
        self.learn(loss, self.trainable_weights)
        return {"loss": loss}


class Averaged(OwnStep):
    """A network learns what its own moving average says of another view."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = dense(FEATURES, 8, 4), dense(FEATURES, 8, 4)
        self.target.trainable = False
        self.predictor = dense(4, 4, 4)

    def call(self, x: Any) -> Any:
        return self.online(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        one, other = (
            x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seeds) for _ in range(2)
        )
        with torch.no_grad():
            wanted = ops.normalize(self.target(other), axis=-1)
        found = ops.normalize(self.predictor(self.online(one)), axis=-1)
        loss = ops.mean(2 - 2 * ops.sum(wanted * found, axis=-1))
        self.learn(loss, self.trainable_weights)
        with torch.no_grad():
            for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
                slow.assign(slow * 0.9 + fast.value * 0.1)
        return {"loss": loss}


class Policy(Classifies):
    """Actions are drawn, and learned by what they bring."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        logits = self(x, training=True)
        actions = keras.random.categorical(logits.detach(), 1, seed=self.seeds)[:, 0]
        brought = ops.cast(ops.equal(ops.cast(actions, y.dtype), y), "float32")
        brought = brought - ops.mean(brought)
        chosen = ops.sum(ops.one_hot(actions, CLASSES) * ops.log_softmax(logits), axis=-1)
        loss = -ops.mean(chosen * brought)
        self.learn(loss, self.trainable_weights)
        return {"loss": loss, "brought": ops.sum(brought)}


class OfTorch(Classifies):
    """An optimizer of torch, and torch's own loss."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        if not hasattr(self, "torchs"):
            parameters = [weight.value for weight in self.trainable_weights]
            self.torchs = torch.optim.SGD(parameters, 0.05, momentum=0.9)
        loss = torch.nn.functional.cross_entropy(self(x, training=True), y.long())
        self.torchs.zero_grad()
        loss.backward()
        self.torchs.step()
        return {"loss": loss.detach()}  # Keras 3.13 takes no logs with a gradient


def rows_of(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, FEATURES), labels(rng, rows)


def pictures(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, SIDE, SIDE, 3), labels(rng, rows)


def series(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, FEATURES, 4), labels(rng, rows)


def points(rng: Rng, rows: int) -> tuple[Any, ...]:
    return reals(rng, rows, 2), labels(rng, rows)


def case(
    name: str,
    model: type[OwnStep],
    batch: Callable[[Rng, int], tuple[Any, ...]] = rows_of,
    **compile_with: Any,
) -> Case:
    def build() -> Any:
        built = model()
        if isinstance(built, Classifies):
            compile_with.setdefault("loss", built.of_rows)
        built.compile(optimizer=adam(), **compile_with)
        return built

    def inputs(rng: Rng, rows: int) -> tuple[Any, ...]:
        x, y = map(ops.convert_to_tensor, batch(rng, rows))  # as `fit` gives them
        return (x, y) if issubclass(model, Classifies) else (x, None)

    return Case(name, build, inputs, rows=(5, 4, 5, 1) if model is not Critic else (5, 4, 5))


OWN_STEPS = [
    case("adversaries", Adversaries),
    case("variational", Variational),
    case("diffusion", Diffusion),
    case("distilled", Distilled, metrics=["accuracy"]),
    case("contrasted", Contrasted, pictures),
    case("critic", Critic),
    case("attacked", Attacked),
    case("physical", Physical, points),
    case("accumulated", Accumulated),
    case("clipped", Clipped),
    case("sharpness aware", SharpnessAware),
    case("mixed", Mixed),
    case("masked", Masked, series),
    case("averaged", Averaged),
    case("policy", Policy),
    case("of torch", OfTorch),
]
