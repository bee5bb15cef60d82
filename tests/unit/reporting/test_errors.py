"""An uncaught error of user code shows no frames of shardcore."""

import logging
import sys
import traceback

import pytest

from shardcore.domain.layouts.mesh import Mesh
from shardcore.reporting import errors
from shardcore.reporting.errors import strip_own_frames


def defined(file, body, **names):
    """A function that is defined in a file of that name."""
    exec(compile(f"def f():\n    {body}\n", file, "exec"), names)
    return names["f"]


def through(file, inner):
    """Calls `inner` from a frame of that file."""
    return defined(file, "inner()", inner=inner)()


def frames(call, message="it"):
    """The files of the frames that are shown, but for those of this test."""
    with pytest.raises(ValueError, match=message) as raised:
        call()
    strip_own_frames(raised.value)
    shown = traceback.extract_tb(raised.value.__traceback__)
    return [each.filename for each in shown if each.filename != __file__]


fail = defined("/home/me/train.py", "raise ValueError('it')")
OURS, KERAS = f"{errors.PACKAGE}/binding/steps.py", "/env/site-packages/keras/src/layer.py"


def test_an_error_of_the_user_is_shown_without_our_frames():
    def called():
        through(OURS, lambda: through(KERAS, lambda: through(OURS, fail)))

    assert frames(lambda: through("<frozen runpy>", called)) == [KERAS, "/home/me/train.py"]


def test_errors_that_cause_each_other_are_stripped_once():
    def called():
        first = ValueError("it")
        try:
            through(OURS, fail)
        except ValueError as error:
            error.__cause__, first.__cause__ = first, error
            raise

    assert frames(called) == ["/home/me/train.py"]


def test_so_are_its_causes():
    def called():
        try:
            through(OURS, fail)
        except ValueError as error:
            raise ValueError("it, again") from error

    with pytest.raises(ValueError, match="again") as raised:
        called()
    strip_own_frames(raised.value)
    assert OURS not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("inner", [OURS, KERAS])
def test_an_error_below_our_code_keeps_every_frame(inner):
    below = defined(OURS, "inner()", inner=defined(inner, "raise ValueError('it')"))
    found = frames(lambda: through("/home/me/train.py", below))
    assert found == ["/home/me/train.py", OURS, inner]


def test_a_debug_log_keeps_every_frame(monkeypatch):
    monkeypatch.setattr(logging.getLogger("shardcore"), "level", logging.DEBUG)
    logging.getLogger("shardcore").manager._clear_cache()
    try:
        assert OURS in frames(lambda: through(OURS, fail))
    finally:
        monkeypatch.undo()
        logging.getLogger("shardcore").manager._clear_cache()


def test_an_error_that_shardcore_raises_on_purpose_keeps_every_frame():
    assert frames(lambda: Mesh((0,), ("axis",)), "has size 0")[-1].startswith(errors.PACKAGE)


def test_the_hook_is_put_back(monkeypatch):
    shown = []
    monkeypatch.setattr("sys.excepthook", lambda *error: shown.append(error))
    before = sys.excepthook
    undo = errors.show_user_frames()
    error = ValueError("it")
    sys.excepthook(ValueError, error, None)
    undo()
    assert sys.excepthook is before
    assert shown == [(ValueError, error, None)]


class NoNotesError(ValueError):
    @property
    def __notes__(self):
        raise KeyError("they cannot be read")


class NoTextError(ValueError):
    def __str__(self):
        raise KeyError("it has none")


def raised(error):
    try:
        raise error
    except ValueError as caught:
        return caught


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (NoNotesError, "NoNotesError: it"),
        (NoTextError, "<exception str() failed>"),
        (ValueError, "ValueError: it"),
    ],
)
def test_every_error_can_be_formatted_with_its_frames(kind, last):
    text = errors.format_error(raised(kind("it")))
    assert text.startswith("Traceback (most recent call last):\n")
    assert "in raised\n" in text
    assert text.endswith(f"{last}\n")


def hook_that_fails(kind, error, trace):
    raise RuntimeError("the hook fails")


def hook_that_exits(kind, error, trace):
    sys.stderr.write(f"the hook shows {error}\n")
    sys.exit(3)


@pytest.mark.parametrize(
    ("hook", "kind", "last"),
    [
        (sys.__excepthook__, ValueError, "ValueError: it"),
        (sys.__excepthook__, NoNotesError, "NoNotesError: it"),  # it would print the address alone
        (hook_that_fails, ValueError, "ValueError: it"),
        (hook_that_exits, ValueError, "the hook shows it"),
    ],
)
def test_every_error_is_shown_once_whatever_the_hook_does(hook, kind, last, capsys):
    errors.show_error(hook, raised(kind("it")))
    shown = capsys.readouterr().err
    assert shown.endswith(f"{last}\n")
    assert shown.count("Traceback") == (hook is not hook_that_exits)


def test_a_line_is_written_also_where_no_stream_can_take_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    errors.say("to no stream\n")
