"""What becomes of a model is drawn: it is trained, asked and changed, in whatever order.

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
from tests.matrix.captured import JitCompile, Run, Told, told_so
from tests.matrix.drawn_models import ACTIVATIONS, OPTIONS, Draw
from tests.matrix.parity import Case

EVENTS = 24
UNDISTURBED = 4
ROWS = (4, 4, 4, 8, 5)
STEPS = (1, 3, 4, 6)  # the fourth is the first that may run from a recording
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
class Life:
    """A model, and what has come of it.

    Args:
        model: the model, compiled.
        case: the model's case, which gives batches.
        jit_compile: what each `compile` is told.
        told: what is done with its steps.
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
    told: Told
    draw: Draw
    data: np.random.Generator = field(factory=lambda: np.random.default_rng(11))
    found: dict[str, np.ndarray] = field(factory=dict)
    kept: list[np.ndarray] | None = None
    twin: Any = None
    happened: int = 0

    def meet(self, event: Callable[["Life"], None]) -> None:
        """Go through `event`; what Keras raises is part of the history: it is left half done."""
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
    case: Case, told: Told, jit_compile: JitCompile, numbers: dict[str, int] | None = None
) -> Run:
    """A history of the model of `case`, which its name decides; then all of its variables.

    In the end nothing changes, and a captured model predicts from a recording.

    Args:
        case: the model and its data.
        told: what is done with its steps.
        jit_compile: what each `compile` is told.
        numbers: for what has no numbers of steps: nothing.
    """
    keras.utils.set_random_seed(7)
    life = Life(case.build(), case, jit_compile, told, Draw(f"history of {case.name}"))
    told_so(life.model, jit_compile, told)
    for number in range(EVENTS):
        life.meet(life.draw.choices(tuple(LIKELY), tuple(LIKELY.values()))[0])
        if number % 2:
            life.meet(train)
    for _ in range(UNDISTURBED):
        life.note("predicted", life.model.predict_on_batch(life.batch(4)[0]))
    life.note("variable", [*life.model.variables, *life.model.optimizer.variables])
    return Run(life.found, {})


def train(life: Life) -> None:
    rows, weighted = life.rows(), life.happens(0.15)
    classes = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0} if life.happens(0.1) and not weighted else None
    for _ in range(life.draw.choice(STEPS)):
        x, y = life.batch(rows)
        weights = life.data.random(len(y)).astype("float32") if weighted else None
        logs = life.model.train_on_batch(x, y, weights, class_weight=classes, return_dict=True)
        life.note("trained", logs)


def test(life: Life) -> None:
    rows = life.rows()
    for _ in range(life.draw.choice(STEPS)):
        life.note("tested", life.model.test_on_batch(*life.batch(rows), return_dict=True))


def predict(life: Life) -> None:
    rows = life.rows()
    for _ in range(life.draw.choice(STEPS)):
        life.note("predicted", life.model.predict_on_batch(life.batch(rows)[0]))


def fit(life: Life) -> None:
    callbacks: list[Any] = []
    if life.happens(0.3):
        callbacks.append(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2))
    if life.happens(0.3):
        callbacks.append(keras.callbacks.EarlyStopping(patience=0, restore_best_weights=True))
    history = life.model.fit(
        *life.batch(13),
        batch_size=4,
        epochs=life.draw.randint(1, 3),
        shuffle=life.happens(0.5),
        steps_per_epoch=life.draw.choice((None, 2)),
        validation_data=life.batch(6),
        validation_batch_size=4,
        callbacks=callbacks,
        verbose=0,
    )
    life.note("fitted", history.history)


def evaluate(life: Life) -> None:
    logs = life.model.evaluate(*life.batch(9), batch_size=4, verbose=0, return_dict=True)
    life.note("evaluated", logs)
    life.note("predicted", life.model.predict(life.batch(7)[0], batch_size=4, verbose=0))


def call(life: Life) -> None:
    life.note("called", life.model(life.batch(4)[0], training=life.happens(0.5)))


def compile_again(life: Life, model: Any = None) -> None:
    rate: Any = 0.01
    if life.happens(0.3):
        rate = keras.optimizers.schedules.ExponentialDecay(rate, 5, 0.8, life.happens(0.5))
    optimizer = getattr(keras.optimizers, life.draw.choice(OPTIMIZERS))
    (model or life.model).compile(
        optimizer(rate, **life.draw.choice(OPTIONS)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=life.draw.choice(METRICS)(),
        weighted_metrics=life.draw.choice(METRICS)(),
        jit_compile=life.jit_compile,
    )


def change_metrics(life: Life) -> None:
    """The optimizer stays."""
    metrics = life.draw.choice(METRICS)()
    model = life.model
    model.compile(model.optimizer, model.loss, metrics=metrics, jit_compile=life.jit_compile)


def change_rate(life: Life) -> None:
    life.model.optimizer.learning_rate = life.draw.choice((0.1, 0.001, 0.02))


def change_attribute(life: Life) -> None:
    """Of a layer or the optimizer."""
    holders = [(each, OF_LAYERS) for each in life.model.layers]
    holders += [(life.model.optimizer, OF_OPTIMIZERS)] * 3
    there = [(h, n, vs) for h, values in holders for n, vs in values.items() if hasattr(h, n)]
    holder, name, values = life.draw.choice(there)
    setattr(holder, name, life.draw.choice(values))


def change_loss(life: Life) -> None:
    life.model.loss.reduction = life.draw.choice(("sum", "sum_over_batch_size"))


def assign(life: Life) -> None:
    variable = life.draw.choice([*life.model.variables, *life.model.optimizer.variables])
    if variable.dtype == "float32":
        variable.assign(life.data.normal(0.5, 0.3, variable.shape).astype("float32"))
    elif "iteration" in variable.path:
        variable.assign(life.draw.randint(0, 9))


def assign_add(life: Life) -> None:
    life.draw.choice(life.model.trainable_variables).assign_add(0.01)


def shrink_weights(life: Life) -> None:
    weights = life.model.get_weights()
    life.model.set_weights([w * 0.9 if w.dtype == "float32" else w for w in weights])


def keep_weights(life: Life) -> None:
    """Or put those back that were kept."""
    if life.kept is None:
        life.kept = life.model.get_weights()
    else:
        weights, life.kept = life.kept, None
        life.model.set_weights(weights)


def load_weights(life: Life) -> None:
    # All ranks, which are forks of one process, have to name the same file.
    path = Path(tempfile.gettempdir()) / f"shardcore-history-{os.getppid()}.weights.h5"
    life.model.save_weights(path)
    train(life)
    life.model.load_weights(path)


def freeze_or_unfreeze(life: Life) -> None:
    layer = life.draw.choice(life.model.layers)
    layer.trainable = not layer.trainable
    if not life.model.trainable_variables:
        layer.trainable = True
    if life.happens(0.7):
        compile_again(life)


def freeze_a_variable(life: Life) -> None:
    variable = life.draw.choice(life.model.trainable_variables)
    variable.trainable = False
    if life.happens(0.7):
        compile_again(life)
    train(life)
    variable.trainable = True
    if life.happens(0.7):
        compile_again(life)


def freeze_all_for_a_while(life: Life) -> None:
    life.model.trainable = False
    predict(life)
    test(life)
    life.model.trainable = True


def adapt_a_layer(life: Life) -> None:
    """By LoRA: it has other variables then."""
    dense = [each for each in life.model.layers if type(each) is keras.layers.Dense]
    life.draw.choice(dense).enable_lora(2)
    compile_again(life)


def set_seed(life: Life) -> None:
    keras.utils.set_random_seed(life.draw.randint(0, 99))


def reset_metrics(life: Life) -> None:
    life.model.reset_metrics()


def run_eagerly_for_a_while(life: Life) -> None:
    life.model.run_eagerly = True
    train(life)
    life.model.run_eagerly = False


def predict_by_a_part(life: Life) -> None:
    """A new model of some of the layers."""
    layer = life.draw.choice(life.model.layers[1:])
    part = keras.Model(life.model.inputs, layer.output)
    told_so(part, life.jit_compile, life.told)
    for _ in range(4):
        life.note("predicted by a part", part.predict_on_batch(life.batch(4)[0]))


def train_a_twin(life: Life) -> None:
    """It has the same layers, another head and an optimizer of its own."""
    if life.twin is None:
        head = keras.layers.Dense(4)(life.model.layers[-2].output)
        life.twin = keras.Model(life.model.inputs, head)
        compile_again(life, life.twin)
    for _ in range(life.draw.choice(STEPS)):
        life.note("twin", life.twin.train_on_batch(*life.batch(4), return_dict=True))


def under_autocast(life: Life) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        life.draw.choice((train, test, predict))(life)


# How likely each is, beside the others.
LIKELY: dict[Callable[[Life], None], int] = {
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
