"""Errors as data: attributes, a message made of them, and pickling for other ranks."""

import pickle

import pytest

from shardcore import errors
from shardcore.domain.errors import describe_error, one_line, text_of
from shardcore.errors import ArgumentProblem, LayoutError, RankFailed

FIELDS = ("name", "expected", "got", "remedy", "rank")


def test_message_is_made_of_the_attributes() -> None:
    error = ArgumentProblem(name="f(x)", expected="a number", got="'y'", remedy="give a number")
    assert str(error) == "Expected a number for f(x), got 'y': give a number."
    assert str(LayoutError(expected="2 dims", got="3")) == "Expected 2 dims, got 3."


def test_message_of_its_own_is_kept() -> None:
    error = LayoutError("The kernel has 3 dims.", name="kernel")
    assert (str(error), error.name, error.got) == ("The kernel has 3 dims.", "kernel", None)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "RankFailed"])
def test_error_survives_pickling(name: str) -> None:
    values = dict(zip(FIELDS, ("a", "b", "c", "d", 3), strict=True))
    if name == "RankMismatchError":
        values["waited_in_vain"] = True
    error = getattr(errors, name)(**values)
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert {field: getattr(copied, field) for field in values} == values


def test_failure_of_a_rank_survives_pickling() -> None:
    copied = pickle.loads(pickle.dumps(RankFailed(3, "rank 3 died")))
    assert (copied.rank, str(copied)) == (3, "rank 3 died")


def test_attributes_have_no_character_that_a_terminal_obeys() -> None:
    assert "\x1b" not in str(ArgumentProblem(name="x", expected="a", got="\x1b[2J"))


def test_text_of_an_error_is_one_line_of_some_length() -> None:
    assert one_line("a\r\n [rank 0] ends\u2028: b \n") == "a [rank 0] ends : b"
    assert one_line("a" * 1000) == "a" * 1000
    assert one_line("a" * 1001) == one_line("a" * 10**7) == "a" * 1000 + " ..."


def test_error_without_a_text_has_the_words_of_python() -> None:
    class NoTextError(ValueError):
        def __str__(self) -> str:
            raise KeyError

    assert text_of(NoTextError()) == "<exception str() failed>"
    assert describe_error(NoTextError()) == "NoTextError: <exception str() failed>"
