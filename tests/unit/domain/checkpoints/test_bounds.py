"""The bounds of a text that is parsed."""

import gc

from shardcore.domain.checkpoints import file_format


def test_the_collector_of_garbage_does_not_walk_through_the_values_of_a_text():
    begins = []

    def note(phase, info):
        begins.append(phase == "start")

    gc.callbacks.append(note)
    try:
        file_format.parse_json(b"[" + b"[]," * 10**5 + b"[]]", 10**6)
    finally:
        gc.callbacks.remove(note)
    assert sum(begins) <= 1, "at most when it goes on"
    assert gc.isenabled()
