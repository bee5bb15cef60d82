"""Interrupts of the main thread, by which a rank ends whose peer has failed."""

import time
import weakref

import pytest

from shardcore.adapters.ranks.failure.main_thread import Interrupt
from shardcore.domain.errors import OtherRankFailed
from shardcore.testing import run_ranks


class Anything:
    """An object of which a weak reference can be made."""


def test_an_interrupt_that_meets_a_callback_of_a_weak_reference_is_raised_all_the_same(capfd):
    def program(rank):
        interrupt, anything = Interrupt(lambda: False), Anything()
        kept = weakref.ref(anything, lambda _: interrupt.interrupt("rank 1 failed"))
        del anything  # the callback runs, and Python ignores its errors
        with pytest.raises(OtherRankFailed, match="rank 1 failed"):
            time.sleep(10)
        interrupt.close()
        return kept() is None

    assert run_ranks(program, 1, init=False) == [True]
    assert capfd.readouterr().err == ""
