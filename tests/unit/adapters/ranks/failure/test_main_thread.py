"""A look at the main thread from another one."""

import gc
import threading
import weakref

from shardcore.adapters.ranks.failure.main_thread import MainThread


class Thing:
    """An object that a weak reference can have."""


def test_a_look_keeps_nothing_of_the_main_thread_alive():
    """A tensor that lives longer on one rank could make its trace differ from the others'."""

    def looked_at():
        thing = Thing()
        thread = threading.Thread(target=MainThread().look)
        thread.start()
        thread.join()
        return weakref.ref(thing)

    gc.disable()
    try:
        assert looked_at()() is None
    finally:
        gc.enable()


def test_a_thread_that_is_in_no_collective_has_no_place():
    assert str(MainThread().look()) == ""
