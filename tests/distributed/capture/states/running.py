"""Runs programs whose state changes between two steps, eagerly and not, and compares the losses."""

import contextlib
import enum
import inspect
import itertools
import logging
import pathlib
import sys
import tempfile
import types
import warnings

import attrs
import keras
import numpy as np

from tests.distributed.capture.states import parts
from tests.distributed.capture.states.programs import Case
from tests.distributed.capture.steps import layer_calls, messages

BEFORE, AFTER = 5, 2  # steps, and epochs after: at most four steps of a kind are recorded
EPOCHS_BEFORE = 4  # of three steps, of which the last has its own program
NUMBERS = itertools.count()
SECONDS = 3.0  # that the first steps take at most, in programs that read a clock
OF_PARTS = """
def build():
    model = network()
    return model, model

def change(model):
    CHANGES[{name!r}](model)

def undo():
    for hook in HOOKS:
        hook.remove()
"""


class Outcome(enum.Enum):
    FRESH = "captured, with the losses of eager steps"
    REFUSED = "not captured, and said why"
    SILENT = "not captured, and said nothing"
    STALE = "other losses than eager steps have"
    FAILED = "an error that eager steps do not have"


@attrs.frozen
class Verdict:
    """The outcome of a program. Its `detail` is the message about the refusal, or the losses."""

    name: str
    outcome: Outcome
    detail: str = ""


def of_parts():
    """Returns a program for each part of a model that changes."""
    text = inspect.getsource(parts)
    return [Case(name, ("a part",), text + OF_PARTS.format(name=name)) for name in parts.CHANGES]


def module_of(name, source, folder, **variables):
    """Returns a module as a file of the user's has it."""
    path = pathlib.Path(folder) / f"{name}.py"
    path.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    vars(module).update(variables)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), vars(module))
    return vars(module)


def loaded(case, folder):
    """Returns the variables of the program: of a module, or of the cells of a notebook."""
    name = f"state_{next(NUMBERS)}"
    module_of(f"{name}_settings", "", folder)
    given = {
        "FILE": str(pathlib.Path(folder) / "read.txt"),
        "OTHER": f"{name}_settings",
        "SECONDS": SECONDS,
    }
    if case.place == "file":
        return module_of(name, case.source, folder, **given)
    cell = {"__name__": "__main__", **given}
    exec(compile(case.source, f"<ipython-input-{name}>", "exec"), cell)
    return cell


def data(rows=4):
    rng = np.random.default_rng(3)
    return [rng.normal(size=(rows, columns)).astype("float32") for columns in (3, 1)]


def steps(model, count):
    return [float(model.train_on_batch(*data())) for _ in range(count)]


def eagerly(case, folder):
    """Returns the losses of eager steps, and those after a change that does not come."""
    program = loaded(case, folder)
    held, model = program["build"]()
    model.run_eagerly = True
    losses = steps(model, BEFORE)
    variables = [*model.variables, *model.optimizer.variables]
    kept = [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
    unchanged = steps(model, AFTER)
    for variable, value in zip(variables, kept, strict=True):
        variable.assign(value)
    try:
        program["change"](held)
        return losses + steps(model, AFTER), unchanged
    finally:
        program["undo"]()


def captured(case, folder):
    """Returns the losses of the steps, and whether the last one before the change was captured."""
    program = loaded(case, folder)
    held, model = program["build"]()
    losses = steps(model, BEFORE - 1)
    with layer_calls() as called:
        losses += steps(model, 1)
    try:
        program["change"](held)
        return losses + steps(model, AFTER), not called
    finally:
        program["undo"]()


class Changes(keras.callbacks.Callback):
    """Changes the state between two epochs, and counts the calls of layers before."""

    def __init__(self, change):
        super().__init__()
        self.change, self.called, self.stack = change, [], contextlib.ExitStack()

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == EPOCHS_BEFORE - 1:
            self.called = self.stack.enter_context(layer_calls())
        elif epoch == EPOCHS_BEFORE:
            self.change()

    def on_epoch_end(self, epoch, logs=None):
        self.stack.close()


def in_fit(case, folder, *, run_eagerly=False):
    """Returns the losses of epochs, and whether the last one before the change was captured."""
    program = loaded(case, folder)
    held, model = program["build"]()
    model.run_eagerly = run_eagerly
    changes = Changes(lambda: program["change"](held))
    x, y = data(24)
    epochs = EPOCHS_BEFORE + AFTER
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [changes]}
    try:
        return model.fit(x, y, epochs=epochs, **options).history["loss"], not changes.called
    finally:
        program["undo"]()


def eagerly_in_fit(case, folder):
    """Returns the losses of eager epochs; that a change makes a difference is known of steps."""
    return in_fit(case, folder, run_eagerly=True)[0], []


ALONE, IN_FIT = (eagerly, captured), (eagerly_in_fit, in_fit)


def verdict(case, folder, said, how=ALONE):
    """Returns what the steps of a program do after a change that eager ones see."""
    run_eagerly, run = how
    expected, unchanged = run_eagerly(case, folder)
    if unchanged:
        is_same = np.allclose(expected[-AFTER:], unchanged, rtol=1e-5)
        assert not is_same, f"{case.name}: the change made no difference"
    said.clear()
    try:
        losses, is_captured = run(case, folder)
    except Exception as error:  # noqa: BLE001 - an error of any class is the outcome
        return Verdict(case.name, Outcome.FAILED, repr(error))
    if not np.allclose(losses, expected, rtol=1e-5, atol=1e-7):
        return Verdict(case.name, Outcome.STALE, f"{losses[-2:]} for {expected[-2:]}")
    if is_captured:
        return Verdict(case.name, Outcome.FRESH)
    outcome = Outcome.REFUSED if said else Outcome.SILENT
    return Verdict(case.name, outcome, " ".join(said))


def verdicts(cases, how=ALONE):
    """Returns what all the programs do, in this process."""
    said = messages()
    logging.getLogger("shardcore").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        return [verdict(case, folder, said, how) for case in cases]


def summary(found):
    """Returns a line for each outcome, and one for each program that is stale, silent or failed."""
    counts = {outcome: sum(each.outcome is outcome for each in found) for outcome in Outcome}
    lines = [
        f"{count} of {len(found)} ({count / len(found):.0%}): {outcome.value}"
        for outcome, count in counts.items()
    ]
    wrong = [each for each in found if each.outcome not in (Outcome.FRESH, Outcome.REFUSED)]
    lines += [f"{each.outcome.name}: {each.name}: {each.detail}" for each in wrong]
    return "\n".join(lines)
