"""Random histories of a model: it is trained, evaluated and changed, in any order.

A captured step must see what came between. The events are those of a user's notebook.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from attrs import define, field

from shardcore.domain.errors import ShardcoreError
from tests.matrix.captured import JitCompile, Observed, Run, apply_jit_compile
from tests.matrix.cases.drawn_models import ACTIVATIONS, OPTIONS, Draw
from tests.matrix.parity import Case

EVENTS = 24
UNDISTURBED = 4
ROWS = (4, 4, 4, 8, 5)
STEPS = (1, 3, 4, 6)  # the fourth is the first that may run from a trace
OPTIMIZERS = ("Adam", "SGD", "AdamW", "RMSprop", "Lion", "Adagrad", "Nadam")
METRICS: tuple[Callable[[], list[Any]], ...] = (
    lambda: [],
    lambda: ["accuracy"],
    lambda: ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
)
# What is set to one of these values, of any layer and of the optimizer, where it is there.
OF_LAYERS: dict[str, tuple[Any, ...]] = {
    "rate": (0.1, 0.5, 0.7),
    "momentum": (0.1, 0.9),
    "epsilon": (0.1, 1e-3),
    "activation": tuple(map(keras.activations.get, ACTIVATIONS)),
}
OF_OPTIMIZERS: dict[str, tuple[Any, ...]] = {
    "clipnorm": (None, 0.5, 2.0),
    "clipvalue": (None, 0.05),
    "global_clipnorm": (None, 0.3),
    "weight_decay": (None, 0.1),
    "beta_1": (0.5, 0.8),
    "epsilon": (0.1, 1e-4),
    "rho": (0.5,),
    "nesterov": (True, False),
    "ema_momentum": (0.5,),
}


@define
class History:
    """A model, and the events of its life.

    Args:
        model: the model, compiled.
        case: the model's case, which gives batches.
        jit_compile: the argument of each `compile`.
        observed: counts of its captured steps.
        draw: decides what comes next.
        data: draws the batches.
        found: logs and predictions by what they came of.
        kept: weights of earlier.
        twin: another model of the same layers.
        happened: how many events there were.
    """

    model: Any
    case: Case
    jit_compile: JitCompile
    observed: Observed
    draw: Draw
    data: np.random.Generator = field(factory=lambda: np.random.default_rng(11))
    found: dict[str, np.ndarray] = field(factory=dict)
    kept: list[np.ndarray] | None = None
    twin: Any = None
    happened: int = 0

    def meet(self, event: Callable[["History"], None]) -> None:
        """Runs `event`; an error of Keras is part of the history, and ends the event early."""
        self.happened += 1
        try:
            event(self)
        except ShardcoreError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            self.note("raised", np.frombuffer(str(error)[:80].encode(), "uint8"))

    def note(self, what: str, nest: Any) -> None:
        """Keep the arrays in `nest`."""
        for leaf in keras.tree.flatten(nest):
            name = f"{len(self.found)}: {what}, event {self.happened}"
            self.found[name] = np.array(keras.ops.convert_to_numpy(leaf))

    def batch(self, rows: int) -> tuple[Any, Any]:
        x, y = self.case.batch(self.data, rows)[:2]
        return x, y

    def rows(self) -> int:
        return self.draw.choice(ROWS)

    def happens(self, chance: float) -> bool:
        return self.draw.random() < chance


def run(
    case: Case, observed: Observed, jit_compile: JitCompile, numbers: dict[str, int] | None = None
) -> Run:
    """A history of the model of `case`, which its name decides; then all of its variables.

    In the end nothing changes, and a captured model predicts from a trace.

    Args:
        case: the model and its data.
        observed: counts of its captured steps.
        jit_compile: the argument of each `compile`.
        numbers: for what has no numbers of steps: nothing.
    """
    keras.utils.set_random_seed(7)
    history = History(case.build(), case, jit_compile, observed, Draw(f"history of {case.name}"))
    apply_jit_compile(history.model, jit_compile, observed)
    for number in range(EVENTS):
        history.meet(history.draw.choices(tuple(LIKELY), tuple(LIKELY.values()))[0])
        if number % 2:
            history.meet(train)
    for _ in range(UNDISTURBED):
        history.note("predicted", history.model.predict_on_batch(history.batch(4)[0]))
    history.note("variable", [*history.model.variables, *history.model.optimizer.variables])
    return Run(history.found, {})


def train(history: History) -> None:
    rows, weighted = history.rows(), history.happens(0.15)
    classes = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0} if history.happens(0.1) and not weighted else None
    for _ in range(history.draw.choice(STEPS)):
        x, y = history.batch(rows)
        weights = history.data.random(len(y)).astype("float32") if weighted else None
        logs = history.model.train_on_batch(x, y, weights, class_weight=classes, return_dict=True)
        history.note("trained", logs)


def test(history: History) -> None:
    rows = history.rows()
    for _ in range(history.draw.choice(STEPS)):
        history.note("tested", history.model.test_on_batch(*history.batch(rows), return_dict=True))


def predict(history: History) -> None:
    rows = history.rows()
    for _ in range(history.draw.choice(STEPS)):
        history.note("predicted", history.model.predict_on_batch(history.batch(rows)[0]))


def fit(history: History) -> None:
    callbacks: list[Any] = []
    if history.happens(0.3):
        callbacks.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2))
    if history.happens(0.3):
        callbacks.append(keras.callbacks.EarlyStopping(patience=0, restore_best_weights=True))
    fitted = history.model.fit(
        *history.batch(13),
        batch_size=4,
        epochs=history.draw.randint(1, 3),
        shuffle=history.happens(0.5),
        steps_per_epoch=history.draw.choice((None, 2)),
        validation_data=history.batch(6),
        validation_batch_size=4,
        callbacks=callbacks,
        verbose=0,
    )
    history.note("fitted", fitted.history)


def evaluate(history: History) -> None:
    logs = history.model.evaluate(*history.batch(9), batch_size=4, verbose=0, return_dict=True)
    history.note("evaluated", logs)
    history.note("predicted", history.model.predict(history.batch(7)[0], batch_size=4, verbose=0))


def call(history: History) -> None:
    history.note("called", history.model(history.batch(4)[0], training=history.happens(0.5)))


def compile_again(history: History, model: Any = None) -> None:
    rate: Any = 0.01
    if history.happens(0.3):
        rate = keras.optimizers.schedules.ExponentialDecay(rate, 5, 0.8, history.happens(0.5))
    optimizer = getattr(keras.optimizers, history.draw.choice(OPTIMIZERS))
    (model or history.model).compile(
        optimizer(rate, **history.draw.choice(OPTIONS)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=history.draw.choice(METRICS)(),
        weighted_metrics=history.draw.choice(METRICS)(),
        jit_compile=history.jit_compile,
    )


def change_metrics(history: History) -> None:
    """The optimizer stays."""
    metrics = history.draw.choice(METRICS)()
    model = history.model
    model.compile(model.optimizer, model.loss, metrics=metrics, jit_compile=history.jit_compile)


def change_rate(history: History) -> None:
    history.model.optimizer.learning_rate = history.draw.choice((0.1, 0.001, 0.02))


def change_attribute(history: History) -> None:
    """Of a layer or the optimizer."""
    holders = [(each, OF_LAYERS) for each in history.model.layers]
    holders += [(history.model.optimizer, OF_OPTIMIZERS)] * 3
    there = [(h, n, vs) for h, values in holders for n, vs in values.items() if hasattr(h, n)]
    holder, name, values = history.draw.choice(there)
    setattr(holder, name, history.draw.choice(values))


def change_loss(history: History) -> None:
    history.model.loss.reduction = history.draw.choice(("sum", "sum_over_batch_size"))


def assign(history: History) -> None:
    variable = history.draw.choice([*history.model.variables, *history.model.optimizer.variables])
    if variable.dtype == "float32":
        variable.assign(history.data.normal(0.5, 0.3, variable.shape).astype("float32"))
    elif "iteration" in variable.path:
        variable.assign(history.draw.randint(0, 9))


def assign_add(history: History) -> None:
    history.draw.choice(history.model.trainable_variables).assign_add(0.01)


def shrink_weights(history: History) -> None:
    weights = history.model.get_weights()
    history.model.set_weights([w * 0.9 if w.dtype == "float32" else w for w in weights])


def keep_weights(history: History) -> None:
    """Or put those back that were kept."""
    if history.kept is None:
        history.kept = history.model.get_weights()
    else:
        weights, history.kept = history.kept, None
        history.model.set_weights(weights)


def load_weights(history: History) -> None:
    # All ranks, which are forks of one process, have to name the same file.
    path = Path(tempfile.gettempdir()) / f"shardcore-history-{os.getppid()}.weights.h5"
    history.model.save_weights(path)
    train(history)
    history.model.load_weights(path)


def freeze_or_unfreeze(history: History) -> None:
    layer = history.draw.choice(history.model.layers)
    layer.trainable = not layer.trainable
    if not history.model.trainable_variables:
        layer.trainable = True
    if history.happens(0.7):
        compile_again(history)


def freeze_a_variable(history: History) -> None:
    variable = history.draw.choice(history.model.trainable_variables)
    variable.trainable = False
    if history.happens(0.7):
        compile_again(history)
    train(history)
    variable.trainable = True
    if history.happens(0.7):
        compile_again(history)


def freeze_all_for_a_while(history: History) -> None:
    history.model.trainable = False
    predict(history)
    test(history)
    history.model.trainable = True


def adapt_a_layer(history: History) -> None:
    """By LoRA: it has other variables then."""
    dense = [each for each in history.model.layers if type(each) is keras.layers.Dense]
    history.draw.choice(dense).enable_lora(2)
    compile_again(history)


def set_seed(history: History) -> None:
    keras.utils.set_random_seed(history.draw.randint(0, 99))


def reset_metrics(history: History) -> None:
    history.model.reset_metrics()


def run_eagerly_for_a_while(history: History) -> None:
    history.model.run_eagerly = True
    train(history)
    history.model.run_eagerly = False


def predict_by_a_part(history: History) -> None:
    """A new model of some of the layers."""
    layer = history.draw.choice(history.model.layers[1:])
    part = keras.Model(history.model.inputs, layer.output)
    apply_jit_compile(part, history.jit_compile, history.observed)
    for _ in range(4):
        history.note("predicted by a part", part.predict_on_batch(history.batch(4)[0]))


def train_a_twin(history: History) -> None:
    """It has the same layers, another head and another optimizer."""
    if history.twin is None:
        head = keras.layers.Dense(4)(history.model.layers[-2].output)
        history.twin = keras.Model(history.model.inputs, head)
        compile_again(history, history.twin)
    for _ in range(history.draw.choice(STEPS)):
        history.note("twin", history.twin.train_on_batch(*history.batch(4), return_dict=True))


def under_autocast(history: History) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        history.draw.choice((train, test, predict))(history)


# How likely each is, beside the others.
LIKELY: dict[Callable[[History], None], int] = {
    train: 6,
    test: 3,
    predict: 3,
    fit: 3,
    evaluate: 2,
    call: 1,
    compile_again: 2,
    change_metrics: 1,
    change_rate: 2,
    change_attribute: 5,
    change_loss: 1,
    assign: 3,
    assign_add: 1,
    shrink_weights: 1,
    keep_weights: 2,
    load_weights: 1,
    freeze_or_unfreeze: 3,
    freeze_a_variable: 1,
    freeze_all_for_a_while: 1,
    adapt_a_layer: 1,
    set_seed: 1,
    reset_metrics: 1,
    run_eagerly_for_a_while: 1,
    predict_by_a_part: 1,
    train_a_twin: 2,
    under_autocast: 1,
}
