"""State that changes between two steps in ways that captured steps once missed."""

import collections.abc
import contextlib
import decimal
import inspect
import math
import random
import sys
import threading
import types
import warnings

import keras
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardcore
from shardcore.testing import RankFailed, run_ranks
from tests.distributed.capture.states import behind_c
from tests.distributed.programs import distribute


def of_an_exception():
    error = ValueError(1.0)
    return lambda: error.args[0], lambda: setattr(error, "args", (3.0,))


def of_a_cause():
    error = ValueError()
    return lambda: 1.0 + bool(error.__cause__), lambda: setattr(error, "__cause__", ValueError())


def of_a_docstring():
    class Described:
        """1.0"""

    return lambda: float(Described.__doc__), lambda: setattr(Described, "__doc__", "3.0")


def of_annotations():
    class Annotated:
        size: 1.0

    notes = Annotated.__annotations__
    return lambda: Annotated.__annotations__["size"], lambda: notes.update(size=3.0)


def of_a_class_name():
    class Named:
        pass

    return lambda: float(len(Named.__name__)), lambda: setattr(Named, "__name__", "N")


def of_a_function_name():
    def named():
        pass

    return lambda: float(len(named.__name__)), lambda: setattr(named, "__name__", "n")


def of_a_signature():
    def function(scale=1.0):
        pass

    def read():
        return inspect.signature(function).parameters["scale"].default

    return read, lambda: setattr(function, "__defaults__", (3.0,))


def of_a_sign():
    zeros = [0.0]
    return lambda: 2 + math.copysign(1, zeros[0]), lambda: zeros.__setitem__(0, -0.0)


def of_the_decimal_context():
    context = decimal.getcontext()
    context.prec = 1
    return lambda: float(decimal.Decimal(1) / 3), lambda: setattr(context, "prec", 5)


def of_a_decimal_number():
    context, number = decimal.getcontext(), decimal.Decimal(1)
    context.prec = 1
    return lambda: float(number / 3), lambda: setattr(context, "prec", 5)


def of_an_own_decimal_context():
    context = decimal.Context(prec=1)
    one, three = decimal.Decimal(1), decimal.Decimal(3)
    return lambda: float(context.divide(one, three)), lambda: setattr(context, "prec", 5)


def of_a_lock():
    lock = threading.Lock()
    return lambda: 1.0 + lock.locked(), lock.acquire


def of_a_slot_wrapper():
    config = types.SimpleNamespace(scale=1.0)
    read = config.__getattribute__
    return lambda: read("scale"), lambda: setattr(config, "scale", 3.0)


def of_a_replaced_module():
    def put(scale):
        module = types.ModuleType("replaced_config")
        module.scale = scale
        sys.modules["replaced_config"] = module

    def read():
        import replaced_config

        return replaced_config.scale

    put(1.0)
    return read, lambda: put(3.0)


def of_a_flat_array():
    array = np.ones(2)
    flat = array.flat
    return lambda: float(flat[0]), lambda: array.__setitem__(0, 3.0)


def of_a_shape():
    tensor = torch.ones(2)
    return lambda: float(tensor.shape[0]), lambda: tensor.resize_(3)


def of_a_gradient():
    tensor = torch.ones(1)
    later = torch.full((1,), 3.0)
    return lambda: 1.0 if tensor.grad is None else tensor.grad, lambda: setattr(
        tensor, "grad", later
    )


def of_a_seed():
    generator = torch.Generator().manual_seed(1)
    return lambda: float(generator.initial_seed()), lambda: generator.manual_seed(3)


def of_a_scripted_module():
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def forward(self):
            return self.scale

    return (module := torch.jit.script(Scale())), lambda: setattr(module, "scale", 3.0)


def of_a_lock_that_is_asked():
    lock = threading.Lock()

    def read():
        is_free = lock.acquire(blocking=False)
        if is_free:
            lock.release()
        return 1.0 + is_free

    return read, lock.acquire


def of_flags():
    array = np.ones(2)
    return lambda: 1.0 + array.flags.writeable, lambda: array.setflags(write=False)


def of_options_of_printing():
    array = np.array([1 / 3])
    np.set_printoptions(precision=8)
    return lambda: float(len(str(array))), lambda: np.set_printoptions(precision=2)


def of_a_thread_name():
    thread = threading.current_thread()
    thread.name = "MainThread"
    return lambda: float(len(threading.current_thread().name)), lambda: setattr(thread, "name", "x")


def of_a_replaced_dict():
    class Config:
        pass

    config = Config()
    config.scale = 1.0
    return lambda: config.scale, lambda: setattr(config, "__dict__", {"scale": 3.0})


def of_a_registered_class():
    class Own:
        pass

    own = Own()
    return (
        lambda: 1.0 + isinstance(own, collections.abc.Sized),
        lambda: collections.abc.Sized.register(Own),
    )


def of_a_submodule():
    def put(scale):
        package.part = types.ModuleType("own_package.part")
        package.part.scale = scale

    package = types.ModuleType("own_package")
    put(1.0)
    sys.modules |= {"own_package": package, "own_package.part": package.part}

    def read():
        import own_package.part as part

        return part.scale

    return read, lambda: put(3.0)


def of_a_random_state():
    random.seed(1)
    return lambda: random.getstate()[1][0] / 2**32, lambda: random.seed(3)


def of_numpys_errors():
    np.seterr(divide="ignore")

    def read():
        try:
            np.ones(1) / np.zeros(1)
        except FloatingPointError:
            return 3.0
        return 1.0

    return read, lambda: np.seterr(divide="raise")


def of_filters_of_warnings():
    warnings.filterwarnings("ignore", "of a scale")

    def read():
        try:
            warnings.warn("of a scale", UserWarning, stacklevel=1)
        except UserWarning:
            return 3.0
        return 1.0

    return read, lambda: warnings.filterwarnings("error", "of a scale")


def of_strides():
    tensor = torch.ones(2, 3)
    return lambda: float(tensor.stride()[0]), tensor.t_


def of_the_type_of_a_tensor():
    tensor = torch.ones(2)
    wide = torch.ones(2, dtype=torch.float64)
    return lambda: 1.0 + (tensor.dtype == wide.dtype), lambda: setattr(tensor, "data", wide)


def of_match_args():
    class Pair:
        __match_args__ = ("first",)
        first, second = 1.0, 3.0

    pair = Pair()

    def read():
        match pair:
            case Pair(scale):
                return scale

    return read, lambda: setattr(Pair, "__match_args__", ("second",))


def of_a_record():
    record = np.array([(1.0,)], dtype=[("scale", float)])[0]
    return lambda: float(record["scale"]), lambda: record.__setitem__("scale", 3.0)


def of_a_format():
    inner = types.SimpleNamespace(scale_of_it=1.0)
    outer = types.SimpleNamespace(inner=inner)

    def read():
        return float("{0.inner.scale_of_it}".format(outer))  # noqa: UP030, UP032 - it is the subject

    return read, lambda: setattr(inner, "scale_of_it", 3.0)


def of_a_name_that_map_looks_up():
    config = types.SimpleNamespace(first_scale=1.0)
    names = ["_".join(["first", "scale"])]
    return lambda: sum(map(getattr, [config], names)), lambda: setattr(config, names[0], 3.0)


def of_a_name_that_an_alias_looks_up():
    config = types.SimpleNamespace(second_scale=1.0)
    name = "_".join(["second", "scale"])

    def read(look_up=getattr):
        return look_up(config, name)

    return read, lambda: setattr(config, name, 3.0)


READERS = {}


def of_a_name_of_a_cell():
    """A function that has no file, and that a global variable alone holds."""
    cell = {}
    exec("def read():\n    return abs(-1.0)", cell)
    READERS["read"] = cell["read"]
    return lambda: 1.0 * READERS["read"](), lambda: cell.update(abs=lambda x: 3.0)


STATES = [value for name, value in list(globals().items()) if name.startswith("of_")]
STATES += behind_c.STATES


def losses(state, jit_compile):
    """Returns the losses of six steps, with a change before the fifth."""
    keras.utils.set_random_seed(1)
    read, change = state()
    scaled = keras.layers.Lambda(lambda x: x * read(), output_shape=(4,))
    model = keras.Sequential([keras.Input((4,)), scaled, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
    found = []
    for step in range(6):
        if step == 4:
            change()
        found.append(float(model.train_on_batch(np.ones((8, 4)), np.ones((8, 1)))))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_state_is_seen_or_the_step_is_eager():
    def program(rank):
        shardcore.install("single")
        return [(losses(state, False), losses(state, "auto")) for state in STATES]

    (pairs,) = run_ranks(program, 1, timeout=180)
    wrong = [
        state.__name__ for state, pair in zip(STATES, pairs, strict=True) if pair[0] != pair[1]
    ]
    assert wrong == []


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.mul else result


class DoubledBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.mul.Tensor else result


def doubled_gradients():
    def double(saved):
        return saved * 2 if saved.is_floating_point() else saved

    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, double)


MODES = (Doubled, DoubledBelow, doubled_gradients, lambda: torch.device("cpu"))


def losses_in(mode, jit_compile):
    """Returns the losses of six steps, the last two within a mode of torch."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
    batch = np.ones((8, 4)), np.ones((8, 1))
    before = [float(model.train_on_batch(*batch)) for _ in range(4)]
    with mode():
        return [*before, *(float(model.train_on_batch(*batch)) for _ in range(2))]


def test_a_mode_of_torch_around_a_step_is_called():
    def program(rank):
        shardcore.install("single")
        plain = losses_in(contextlib.nullcontext, False)
        return plain, [(losses_in(mode, False), losses_in(mode, "auto")) for mode in MODES]

    ((plain, pairs),) = run_ranks(program, 1)
    assert [eager != plain for eager, _ in pairs] == [True, True, True, False]
    assert [captured == eager for eager, captured in pairs] == [True] * 4


SCALES = [1.0]


class Interfering(keras.Sequential):
    """A model that changes a list between two steps of an epoch."""

    def make_train_function(self, force=False):
        if self.train_function is not None and not force:
            return
        super().make_train_function(force=force)
        run, steps = self.train_function, []

        def interfere(iterator):
            steps.append(1)
            SCALES[0] = 1.0 + (len(steps) > 4)
            return run(iterator)

        self.train_function = interfere


def test_a_loop_of_the_user_may_change_state_within_an_epoch():
    def loss(jit_compile):
        keras.utils.set_random_seed(1)
        scaled = keras.layers.Lambda(lambda x: x * SCALES[0], output_shape=(4,))
        model = Interfering([keras.Input((4,)), scaled, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=jit_compile)
        return model.fit(np.ones((64, 4)), np.ones((64, 1)), 8, verbose=0).history["loss"]

    def program(rank):
        shardcore.install("single")
        return loss(False), loss("auto")

    ((eager, captured),) = run_ranks(program, 1)
    assert captured == eager


def test_a_mode_on_one_rank_is_an_error_that_names_the_rank_and_the_mode(monkeypatch):
    monkeypatch.setenv("SHARDCORE_TIMEOUT", "5")

    def program(rank):
        distribute((2, 1))
        return losses_in(DoubledBelow if rank == 0 else contextlib.nullcontext, "auto")

    message = r"Rank 0 records train_step .* the active mode of torch \(DoubledBelow\)"
    with pytest.raises(RankFailed, match=message):
        run_ranks(program, 2)
