import logging

import pytest

from shardcore.reporting import logs


@pytest.fixture(autouse=True)
def quiet_root(monkeypatch):
    """The program has set no log up, and finds none of ours afterwards."""
    names = ("shardcore", "shardcore.variables")
    ours = logging.getLogger("shardcore")
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    yield
    for name in names:
        logging.getLogger(name).setLevel(logging.NOTSET)
    ours.propagate = True


def said(capsys, rank, subject="variables", handlers=()):
    logging.getLogger().handlers[:] = handlers  # pytest's own would count as the program's
    logs.configure(lambda: rank)
    logger = logging.getLogger(f"shardcore.{subject}")
    logger.debug("fine")
    logger.info("known")
    logger.warning("careful")
    return capsys.readouterr().err.splitlines()


def test_rank_0_tells_what_matters(capsys):
    assert said(capsys, 0) == ["[shardcore rank 0] known", "[shardcore rank 0] careful"]


def test_other_ranks_are_silent(capsys):
    assert said(capsys, 1) == []


def test_debug_tells_all(capsys, monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "debug")
    assert said(capsys, 0)[0] == "[shardcore rank 0] fine"


def test_other_ranks_speak_when_asked(capsys, monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "warning,all-ranks")
    assert said(capsys, 3) == ["[shardcore rank 3] careful"]


def test_a_log_can_be_limited_to_one_subject(capsys, monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "variables")
    assert "[shardcore rank 0] fine" in said(capsys, 0)
    assert "[shardcore rank 0] fine" not in said(capsys, 0, subject="session")


def test_a_program_with_its_own_log_keeps_it(capsys):
    assert said(capsys, 0, handlers=[logging.NullHandler()]) == []
    assert logging.getLogger("shardcore").propagate


def test_configured_twice_speaks_once(capsys):
    said(capsys, 0)
    assert len(said(capsys, 0)) == 2
