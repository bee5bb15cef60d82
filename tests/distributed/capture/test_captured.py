"""A captured step has the numbers of the eager one, and sees whatever the eager one would see."""

import logging
import os
import random
import sys

import attrs
import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.adapters.capture import program as capture_program
from shardcore.adapters.capture.program import started
from shardcore.adapters.torch_private import inductor, is_all_reduce
from shardcore.testing import RankFailed, count_collectives, run_ranks
from tests.distributed.programs import DEVICE, IS_ON_GPU, distribute, needs_compiler

ROWS, STEPS = 8, 7
RNG = np.random.default_rng(3)
calls = []  # of the Python of a model, which a captured step does not run
CALLED = "shardcore.tests.called"
# A step that changed a variable of Python would not be captured: the interpreter counts for it.
sys.addaudithook(lambda event, args: calls.append(args[0]) if event == CALLED else None)


def is_real(x):
    """Returns whether Keras computes, and does not infer shapes."""
    return isinstance(x, torch.Tensor) and not x.is_meta


class Spy(keras.layers.Layer):
    """Notes that its Python was run, where no recording looks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.factors = [1.0, 1.0]

    def call(self, x):
        if is_real(x):
            sys.audit(CALLED, self.name)
        return x * self.factors[0] if self.factors[0] != 1.0 else x


def mlp():
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="relu", name="first", kernel_regularizer="l2")(Spy()(x))
    h = keras.layers.Dropout(0.4, seed=5)(keras.layers.Dropout(0.2)(h))
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


def cnn():
    x = keras.Input((6, 6, 2))
    h = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3)(Spy()(x)))
    h = keras.layers.Flatten()(keras.layers.MaxPooling2D()(keras.layers.ReLU()(h)))
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


def decoder():
    x = keras.Input((5,), dtype="int32")
    h = Spy()(keras.layers.Embedding(12, 8)(x))
    h += keras.layers.MultiHeadAttention(2, 4, name="attention")(h, h, use_causal_mask=True)
    h = keras.layers.LayerNormalization()(h)
    return keras.Model(x, keras.layers.Dense(4, name="head")(h[:, -1]))


def lstm():
    x = keras.Input((4, 3))
    return keras.Model(x, keras.layers.Dense(4, name="head")(keras.layers.LSTM(6)(Spy()(x))))


def plain_mlp():
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="gelu", name="first")(Spy()(x))
    h = keras.layers.Dropout(0.2, seed=5)(keras.layers.Dropout(0.2)(h))
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


def scaled():
    """Tensors are constants of its graph, as Gemma and T5 of keras-hub have them."""
    x = keras.Input((6,))
    h = Spy()(x) * keras.ops.cast(keras.ops.sqrt(64.0), "float32")
    h = keras.ops.clip(keras.layers.Dense(8, name="first")(h), -1.0, x_max=torch.tensor(3.0))
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


SHAPES = {mlp: (6,), scaled: (6,), plain_mlp: (6,), cnn: (6, 6, 2), decoder: (5,), lstm: (4, 3)}
RULES = {
    "first/kernel": (None, "model"),
    "first/bias": ("model",),
    "attention/(query|key|value)/kernel": (None, "model", None),
    "attention/output/kernel": ("model", None, None),
    "head/kernel": ("model", None),
}


def batches(build, steps=STEPS):
    rng = np.random.default_rng(3)
    draw = rng.normal if build is not decoder else lambda size: rng.integers(0, 12, size)
    return [
        (draw(size=(ROWS, *SHAPES[build])).astype("float32"), rng.integers(0, 4, ROWS))
        for _ in range(steps)
    ]


def compiled(build, jit_compile, optimizer="adam"):
    keras.utils.set_random_seed(7)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model


def trained(model, data):
    """All that `model` computes and keeps, and how often its Python ran."""
    calls.clear()
    found = [model.train_on_batch(x, y) for x, y in data]
    runs = len(calls)
    found += [model.test_on_batch(*data[0]) for _ in range(5)]
    found += [model.predict_on_batch(data[0][0]) for _ in range(5)]
    return [*map(np.asarray, found), *state(model)], runs


def state(model):
    return [keras.ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]


def assert_equal(found, expected):
    """The numbers are the same; on a GPU all but the last digits."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if IS_ON_GPU:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(one, other)


def begin(shape):
    if shape is None:
        shardcore.install("single")
    else:
        distribute(shape, RULES)


CASES = [
    (mlp, None),
    (mlp, (2, 1)),
    (mlp, (1, 2)),
    (scaled, (2, 1)),
    (cnn, (2, 1)),
    (decoder, (1, 2)),
    (lstm, None),
]


@pytest.mark.parametrize(("build", "shape"), CASES)
def test_captured_steps_have_the_numbers_of_eager_ones(build, shape):
    def program(rank):
        begin(shape)
        data = batches(build)
        return [trained(compiled(build, jit), data) for jit in (False, "auto")]

    for (eager, eager_runs), (captured, runs) in run_ranks(program, 1 if shape is None else 2):
        assert_equal(captured, eager)
        assert (eager_runs, runs) == (STEPS, 2)  # both are recorded


def assign(model, data):
    model.get_layer("head").kernel.assign(np.full((8, 4), 0.25, "float32"))


def learn_slower(model, data):
    model.optimizer.learning_rate = 1e-4


def freeze(model, data):
    model.get_layer("first").trainable = False


def drop_more(model, data):
    model.layers[-3].rate = 0.9


def put_weights_back(model, data):
    model.set_weights([np.zeros_like(each) for each in model.get_weights()])


def compile_again(model, data):
    model.compile("sgd", model.loss, jit_compile=model.jit_compile)


def other_rows(model, data):
    data[:] = [(x[:6], y[:6]) for x, y in data]


def regularize_less(model, data):
    model.get_layer("first").kernel_regularizer.l2 = 1e-6


def other_element(model, data):
    model.layers[1].factors[0] = 3.0


def other_function(model, data):
    model.get_layer("first").activation = keras.activations.tanh


CHANGES = [
    assign,
    other_element,
    other_function,
    learn_slower,
    freeze,
    drop_more,
    put_weights_back,
    compile_again,
    other_rows,
    regularize_less,
]


@pytest.mark.parametrize(("shape", "changes"), [(None, CHANGES), ((1, 2), CHANGES[::3])])
def test_a_change_between_steps_is_seen_by_the_next_step(shape, changes):
    def program(rank):
        begin(shape)
        return [{c.__name__: changed(c, jit) for c in changes} for jit in (False, "auto")]

    def changed(change, jit):
        model, data = compiled(mlp, jit), batches(mlp, 5)
        losses = [model.train_on_batch(x, y) for x, y in data]
        change(model, data)
        losses += [model.train_on_batch(x, y) for x, y in data]
        return [*map(np.asarray, losses), *state(model)]

    for eager, captured in run_ranks(program, 1 if shape is None else 2, timeout=180):
        for name in eager:
            assert_equal(captured[name], eager[name])
        found = [str(each) for each in eager.values()]
        assert len(set(found)) == len(found), "two changes made no difference"


@pytest.mark.parametrize("shape", [None, (1, 2)])
def test_a_step_under_autocast_is_another_one_and_is_not_cast_twice(shape):
    """A step in `float32` is captured before, and what follows runs from its recording again."""

    def program(rank):
        begin(shape)
        return [autocasting(jit) for jit in (False, "auto")]

    def autocasting(jit):
        model, data, found, runs = compiled(mlp, jit), batches(mlp, 5), [], []
        for enabled in (False, True, False):
            calls.clear()
            for x, y in data:
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
                    found += [*model.train_on_batch(x, y), model.predict_on_batch(x)]
            runs.append(len(calls))
        return [*map(np.asarray, found), *state(model)], runs

    for (eager, eager_runs), (captured, runs) in run_ranks(program, 1 if shape is None else 2):
        assert_equal(captured, eager)
        assert (eager_runs, runs) == ([10, 10, 10], [4, 4, 0])


class Options:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


class Holding(Spy):
    power = 1.0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.array, self.options = np.ones(2, "float32"), Options()
        self.table = [[1.0]]

    def call(self, x):
        factor = self.table[0][0] * self.options.factor * type(self).power
        return super().call(x) * (factor * float(self.array[1]))


def in_an_array(layer):
    layer.array[1] = 2.0


def in_a_list_of_a_list(layer):
    layer.table[0][0] = 3.0


def in_a_slot(layer):
    layer.options.factor = 0.1


def in_the_class(layer):
    type(layer).power = 0.5


def test_a_change_in_a_nested_object_or_a_class_is_seen():
    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(1)(Holding()(x)))
        model.compile("sgd", "mse", jit_compile=jit)
        calls.clear()
        losses = []
        for change in (in_an_array, in_a_list_of_a_list, in_a_slot, in_the_class):
            data = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
            losses += [float(model.train_on_batch(*data)) for _ in range(4)]
            change(model.layers[1])
        losses += [float(model.train_on_batch(*data)) for _ in range(4)]
        return losses, len(calls)

    ((losses, runs),) = run_ranks(program, 1, "auto")
    ((eager, _),) = run_ranks(program, 1, False)
    assert_equal(losses, eager)
    assert runs == 10  # two after each change


def warmed_up():
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 20, warmup_target=0.1, warmup_steps=6)
    return keras.optimizers.Adam(schedule)


WAYS = {
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "warmed up": warmed_up,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_branches_on_a_count_is_captured_for_each_branch(way):
    def program(rank):
        begin(None)
        data = batches(plain_mlp, 16)
        return [trained(compiled(plain_mlp, jit, WAYS[way]()), data) for jit in (False, "auto")]

    (((eager, _), (captured, runs)),) = run_ranks(program, 1)
    assert_equal(captured, eager)
    assert runs == 4  # two of each way


def messages(level=logging.WARNING):
    """The messages about capture from now on."""
    said = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("shardcore.capture")
    logger.setLevel(level)
    logger.addHandler(handler)
    return said


def reasons(build, jit="auto", steps=4, shape=None, model_class=None):
    """The messages about steps that are not captured."""
    begin(shape)
    said = messages()
    keras.utils.set_random_seed(1)
    x = keras.Input((4,))
    model = (model_class or keras.Model)(x, keras.layers.Dense(1)(build()(x)))
    model.compile("sgd", "mse", jit_compile=jit)
    calls.clear()
    for _ in range(steps):
        model.train_on_batch(np.ones((4, 4), "float32"), np.ones((4, 1), "float32"))
    return said, len(calls)


def unguarded(name):
    """A global variable whose name no function has, so that no guard sees it."""
    return getattr(sys.modules[__name__], name.upper())


class ReadsValues(Spy):
    def call(self, x):
        if is_real(x) and x.detach().cpu().numpy().sum() > 1e9:
            return -x
        return super().call(x)


class Counts(Spy):
    count = 0

    def call(self, x):
        self.count += is_real(x)
        return super().call(x)


class DrawsFromGlobal(Spy):
    def call(self, x):
        return super().call(x) * float(RNG.random())


class Draws(Spy):
    def call(self, x):
        return super().call(x) * float(unguarded("rng").random())


class TakesABranch(Spy):
    def call(self, x):
        x = super().call(x)
        return x * 2 if is_real(x) and random.random() < 0.01 else x


class SetsTheGenerator(Spy):
    def call(self, x):
        if is_real(x):
            torch.manual_seed(0)
        return super().call(x) + torch.rand_like(x)


class Keeps(Spy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cache = {"last": 0}

    def call(self, x):
        self.cache["last"] = x
        return super().call(x)


class IsSparse(Spy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.adjacent = torch.eye(4, device=DEVICE).to_sparse()

    def call(self, x):
        return torch.sparse.mm(self.adjacent, super().call(x)) if is_real(x) else x


class IsHooked(Spy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_forward_hook(lambda *given: None)


NOT_HELD = torch.ones(4)


class ReadsUnguarded(Spy):
    def call(self, x):
        return super().call(x) * (unguarded("not_held").to(x.device) if is_real(x) else 1.0)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (ReadsValues, "reads values on the host"),
        (Counts, "attribute 'count' of Counts"),
        (Draws, "in one step was"),
        (DrawsFromGlobal, "global variable 'RNG'"),
        (TakesABranch, "Python or NumPy draws random numbers"),
        (SetsTheGenerator, "the state of torch's random generator is set"),
        (Keeps, "attribute 'cache' of Keeps"),
        (IsSparse, "a sparse tensor"),
        (IsHooked, "has a hook"),
        (ReadsUnguarded, "that no variable, torch module or attribute of a layer holds"),
    ],
)
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_once_why(layer, said):
    ((messages, runs),) = run_ranks(lambda rank: reasons(layer, steps=6), 1)
    assert runs == 6
    (message,) = messages
    assert "train_step of model" in message
    assert said in message
    if layer is ReadsValues:
        assert "test_captured.py" in message


def double(parameter):
    parameter.grad = parameter.grad * 2


def double_in_place(parameter):
    parameter.grad.mul_(2)


@pytest.mark.parametrize("change", [double, double_in_place])
def test_a_step_whose_gradient_a_hook_changes_before_its_sum_runs_eagerly(change):
    def program(rank):
        begin((2, 1))
        said, data = messages(), batches(plain_mlp, 3)
        found = []
        for jit in (False, "auto"):
            model = compiled(plain_mlp, jit, "sgd")  # Adam's update does not depend on the scale
            kernel = model.get_layer("first").kernel.value
            kernel.register_post_accumulate_grad_hook(change)
            found.append(trained(model, data))
        return found, said

    for ((eager, _), (captured, runs)), said in run_ranks(program, 2):
        assert_equal(captured, eager)
        assert runs == 3
        assert "a hook of a parameter changes its gradient" in said[0]


@pytest.mark.parametrize(
    ("switch", "on", "off"),
    [
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.use_deterministic_algorithms, True, False),
    ],
)
def test_a_step_in_another_mode_of_torch_is_recorded_by_itself(switch, on, off):
    def program(rank):
        begin(None)
        model, data, runs = compiled(mlp, "auto"), batches(mlp, 5), []
        for mode in (off, on, off, on):
            calls.clear()
            switch(mode)
            for x, y in data:
                model.train_on_batch(x, y)
            runs.append(len(calls))
        return runs

    assert run_ranks(program, 1) == [[2, 2, 0, 0]]


def test_autocast_that_keeps_casts_of_weights_is_a_reason_to_run_eagerly():
    def program(rank):
        begin(None)
        said, model = messages(), compiled(mlp, "auto")
        with torch.autocast(DEVICE, torch.bfloat16):
            for x, _ in batches(mlp):
                model.predict_on_batch(x)
        return said

    ((message,),) = run_ranks(program, 1)
    assert "cache_enabled=False" in message


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize(
    ("jit", "model_class", "runs"),
    [("auto", None, 2), (False, None, 4), ("auto", OwnStep, 4)],
)
def test_steps_are_captured_where_compile_says_so(jit, model_class, runs):
    program = run_ranks(lambda rank: reasons(Spy, jit, model_class=model_class), 1)
    assert program == [([], runs)]


class OfTorch(keras.Model):
    """It learns by an optimizer of torch, which keeps its options in dicts in a list."""

    def train_step(self, data):
        x, y = data
        if not hasattr(self, "torchs"):
            parameters = [weight.value for weight in self.trainable_weights]
            self.torchs = torch.optim.SGD(parameters, 0.05, momentum=0.5)
        loss = torch.nn.functional.mse_loss(self(x, training=True), y)
        self.torchs.zero_grad()
        loss.backward()
        self.torchs.step()
        return {"loss": loss}


@pytest.mark.parametrize("shape", [None, (2, 1)])
def test_a_change_in_an_optimizer_of_torch_is_seen(shape):
    x, y = (np.random.default_rng(0).normal(size=(8, 4)).astype("float32") for _ in range(2))

    def trained(jit):
        begin(shape)
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = OfTorch(inputs, keras.layers.Dense(4)(Spy()(inputs)))
        model.compile(jit_compile=jit)
        calls.clear()
        losses, runs = [], []
        for rate in (0.05, 0.5, 0.0):
            losses += model.fit(x, y, batch_size=4, epochs=3, verbose=0).history["loss"]
            model.torchs.param_groups[0]["lr"] = rate
            if rate == 0.05:  # it makes other lists and dicts; a changed number must do alone
                model.torchs.load_state_dict(model.torchs.state_dict())
            runs.append(len(calls))
        return losses, runs, model.get_weights()

    def program(rank):
        # The graphs run without Inductor: its seconds would show nothing more.
        inductor.compiled = lambda graph, examples: graph
        return trained(False), trained(True)

    ranks = 2 if shape else 1
    for (expected, _, weights), (losses, runs, found) in run_ranks(program, ranks):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(found[0], weights[0], rtol=1e-4, atol=1e-6)
        assert runs[0] < 6


def test_a_step_within_a_step_is_part_of_it():
    def program(rank):
        inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        inner.compile("sgd", "mse")

        class Outer(keras.Model):
            def train_step(self, data):
                inner.train_on_batch(np.ones((4, 4), "float32"), np.ones((4, 1), "float32"))
                return super().train_step(data)

        said, runs = reasons(Spy, True, steps=6, model_class=Outer)
        return said, runs

    ((said, runs),) = run_ranks(program, 1)
    assert len(said) == 1
    assert runs == 6  # the inner model is none of the outer's


def test_a_count_that_the_step_writes_before_it_is_read_is_counted_once():
    class Counting(Spy):
        def build(self, shape):
            self.count = self.add_weight(shape=(), dtype="int32", trainable=False)

        def call(self, x):
            x = super().call(x)
            if is_real(x):
                self.count.assign(self.count + 1)
                if keras.ops.equal(self.count % 2, 1):
                    return x * 2
            return x

    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(1)(Counting()(x)))
        model.compile("sgd", "mse", jit_compile=jit)
        data = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
        calls.clear()
        losses = [float(model.train_on_batch(*data)) for _ in range(10)]
        return losses, int(model.layers[1].count), len(calls)

    ((losses, count, runs),) = run_ranks(program, 1, "auto")
    ((eager, counted, _),) = run_ranks(program, 1, False)
    assert (losses, count) == (eager, counted)
    assert runs == 4


def test_ranks_capture_a_step_together_or_not_at_all():
    class CountsOnOneRank(Spy):
        def call(self, x):
            if is_real(x) and torch.distributed.get_rank() == 1:
                self.count = getattr(self, "count", 0) + 1
            return super().call(x)

    first, second = run_ranks(lambda rank: reasons(CountsOnOneRank, shape=(2, 1)), 2)
    assert first[1] == second[1] == 4
    assert "'count'" in first[0][0]
    assert first[0] == second[0]


def test_ranks_whose_collectives_have_other_sizes_capture_nothing():
    def longer(tape):
        return [attrs.evolve(each, elements=each.elements + 1) for each in started(tape)]

    def program(rank):
        if rank == 1:
            capture_program.started = longer
        return reasons(Spy, shape=(2, 1))

    for said, runs in run_ranks(program, 2):
        assert runs == 4
        assert "the ranks start other collectives" in said[0]


def test_a_rank_that_alone_sees_a_change_says_so_on_all():
    def program(rank):
        os.environ["SHARDCORE_TIMEOUT"] = "1"
        begin((2, 1))
        model, data = compiled(plain_mlp, "auto"), batches(plain_mlp, 4)
        for x, y in data:
            model.train_on_batch(x, y)
        if rank == 1:
            model.get_layer("first").activation = keras.activations.tanh
        model.train_on_batch(*data[0])

    said = "(?s)rank 1 .*Rank 1 records train_step of .* again, because attribute 'activation' of"
    with pytest.raises(RankFailed, match=said):
        run_ranks(program, 2, timeout=20)


def test_one_tensor_twice_is_another_batch_than_two():
    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse", jit_compile=jit)
        clean, noisy = torch.ones(4, 4), torch.full((4, 4), 2.0)
        batches = [(clean, clean)] * 4 + [(noisy, clean)] * 4
        return [float(model.train_on_batch(*batch)) for batch in batches]

    assert run_ranks(program, 1, "auto") == run_ranks(program, 1, False)


def test_another_global_seed_is_seen():
    class Noisy(Spy):
        def call(self, x):
            x = super().call(x)
            return x + keras.random.normal(x.shape) if is_real(x) else x

    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.Dense(1)(Noisy()(x)))
        model.compile("sgd", "mse", jit_compile=jit)
        losses = []
        for step in range(9):
            if step == 5:
                keras.utils.set_random_seed(2)
            x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
            losses.append(float(model.train_on_batch(x, y)))
        return losses

    assert run_ranks(program, 1, "auto") == run_ranks(program, 1, False)


def test_the_state_of_a_torch_module_is_read_at_each_step():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            if is_real(x):
                self.scale.mul_(1.5)
            return self.linear(x) * self.scale

    def program(rank, jit):
        begin(None)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.TorchModuleWrapper(Scaled())])
        model.compile("sgd", "mse", jit_compile=jit)
        x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
        losses = [float(model.train_on_batch(x, y)) for _ in range(5)]
        module = model.layers[0].module
        module.scale = torch.full_like(module.scale, 0.1)
        return losses + [float(model.train_on_batch(x, y)) for _ in range(5)]

    assert_equal(run_ranks(program, 1, "auto"), run_ranks(program, 1, False))


def test_a_small_data_parallel_step_sends_gradients_and_logs_in_one_all_reduce():
    def program(rank):
        begin((2, 1))
        model, data = compiled(decoder, "auto"), batches(decoder)
        for x, y in data:
            model.train_on_batch(x, y)
        with count_collectives() as traffic:
            model.train_on_batch(*data[0])
        trainable = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
        return dict(traffic.calls), sum(traffic.operand_bytes.values()) - trainable

    for made, beyond in run_ranks(program, 2):
        assert made == {"all_reduce": 1}
        assert 0 < beyond <= 16  # the loss, and what was right


def test_auto_is_kept_in_a_saved_model(tmp_path):
    def program(rank):
        begin(None)
        model = compiled(mlp, "auto")
        model.train_on_batch(*batches(mlp)[0])
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras", {"Spy": Spy})
        return loaded.jit_compile == "auto" and not loaded.jit_compile

    assert run_ranks(program, 1) == [True]


@needs_compiler
def test_a_compiled_step_has_the_numbers_of_the_eager_one():
    def program(rank):
        begin(None)
        data, sgd = batches(plain_mlp), lambda: keras.optimizers.SGD(0.1, momentum=0.9)
        said = messages()
        return [trained(compiled(plain_mlp, jit, sgd()), data) for jit in (False, True)], said

    ((((eager, _), (captured, runs)), said),) = run_ranks(program, 1, timeout=300)
    assert runs == 2
    assert not said  # all of it is compiled
    for one, other in zip(captured, eager, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def pair():
    x = keras.Input((6,))
    h = keras.layers.Dense(8, activation="gelu", name="first")(x)
    return keras.Model(x, keras.layers.Dense(4, name="head")(h))


@needs_compiler
def test_a_compiled_step_of_two_ranks_has_the_numbers_of_the_eager_one():
    by_torch, sums = inductor.compiled, []

    def noted(graph, examples):
        sums.append([is_all_reduce(node.target) for node in graph.graph.nodes].count(True))
        return by_torch(graph, examples)

    def program(rank):
        inductor.compiled = noted
        said = messages()
        return [steps(shape) for shape in ((2, 1), (1, 2))], said, sums

    def steps(shape):
        begin(shape)
        return [trained(jit) for jit in (False, True)]

    def trained(jit):
        model = compiled(pair, jit, keras.optimizers.SGD(0.1, momentum=0.9))
        losses = [model.train_on_batch(x, y) for x, y in batches(plain_mlp, 5)]
        return [*map(np.asarray, losses), *state(model)]

    for found, said, reduced in run_ranks(program, 2, timeout=300):
        assert not said  # all of it is compiled,
        assert reduced == [1, 1]  # the sums too: of gradients and logs, and of what a layer makes
        for eager, captured in found:
            for one, other in zip(captured, eager, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_step_that_fails_to_compile_is_captured_with_a_message():
    def fails(*given):
        raise RuntimeError("no compiler is here")

    def program(rank):
        inductor.compiled = fails
        return reasons(Spy, True)

    ((said, runs),) = run_ranks(program, 1)
    assert runs == 2
    assert len(said) == 1
    assert "not compiled as jit_compile=True asks: RuntimeError: no compiler is here" in said[0]


def test_a_recording_runs_while_shardcore_is_installed_and_no_longer():
    def program(rank):
        begin(None)
        model, data = compiled(plain_mlp, "auto"), batches(plain_mlp, 4)
        runs = []
        for installed in (True, False, True):
            calls.clear()
            shardcore.uninstall()
            if installed:
                begin(None)
            for x, y in data:
                model.train_on_batch(x, y)
            runs.append(len(calls))
        return runs

    assert run_ranks(program, 1) == [[2, 4, 2]]


def test_fits_with_validation_and_callbacks_are_recorded_once_for_each_kind_of_batch():
    def program(rank):
        begin((2, 1))
        return fitted(False), fitted("auto")

    def fitted(jit):
        model, data = compiled(plain_mlp, jit), batches(plain_mlp, 4)
        x, y = (np.concatenate(each) for each in zip(*data, strict=True))
        found, runs = [], []
        for _ in range(3):
            calls.clear()
            callbacks = [keras.callbacks.ReduceLROnPlateau(patience=1)]
            fit = model.fit(x, y, 12, 3, 0, callbacks, validation_split=0.25)
            found += [*fit.history.values(), model.evaluate(x, y, 12, verbose=0)]
            found.append(model.predict(x, 12, verbose=0))
            runs.append(len(calls))
        return [np.asarray(each) for each in found], runs

    for (eager, _), (captured, runs) in run_ranks(program, 2):
        assert_equal(captured, eager)
        assert runs[2] == 0
