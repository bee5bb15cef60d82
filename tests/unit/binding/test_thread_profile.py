"""A profile of one thread has its calls, with their callers, and no other thread's."""

import sys
import threading
import time

import pytest

if sys.version_info < (3, 12):
    pytest.skip("cProfile has the calls of one thread there", allow_module_level=True)

from shardcore.binding.capture.python_state.thread_profile import ThreadProfile


def inner():
    return len("abc")


def outer():
    return [inner() for _ in range(3)]


def ask_the_time(ends):
    while not ends.is_set():
        time.monotonic()


def calls_of(profile):
    """Returns the names of the functions that each function calls."""
    return {name(entry): set(map(name, entry.calls)) for entry in profile.getstats()}


def name(entry):
    return getattr(entry.code, "co_name", entry.code)


@pytest.fixture
def profile():
    profile = ThreadProfile()
    profile.start()
    yield profile
    profile.stop()


def test_it_has_who_calls_what(profile):
    profile.enable()
    outer()
    profile.disable()
    calls = calls_of(profile)
    assert calls["outer"] == {"inner"}
    assert calls["inner"] == {"<built-in method builtins.len>"}


def test_it_has_no_calls_of_another_thread(profile):
    ends = threading.Event()
    thread = threading.Thread(target=ask_the_time, args=(ends,))
    profile.enable()
    thread.start()
    time.sleep(0.05)
    ends.set()
    thread.join()
    profile.disable()
    assert "<built-in method time.monotonic>" not in calls_of(profile)


def test_there_is_one_profiler_at_a_time(profile):
    with pytest.raises(ValueError, match="in use"):
        ThreadProfile().start()
