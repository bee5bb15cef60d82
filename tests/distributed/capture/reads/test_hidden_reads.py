"""Reads of Python code without a name that says so: they are seen, or the step runs eagerly."""

import keras
import numpy as np
import pytest
import torch

import shardcore
from shardcore.testing import run_ranks
from tests.distributed.capture.reads import class_reads, function_reads, library_reads
from tests.distributed.capture.reads.held_reads import HELD
from tests.distributed.capture.reads.hidden_reads import REFUSED, SEEN, text_of_error
from tests.distributed.capture.reads.running import BATCH, Reads, check, compare_all


def test_what_has_no_name_of_its_own_is_seen(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")
    cases = (*SEEN, *REFUSED)
    ((numbers, refused),) = run_ranks(lambda rank: compare_all(cases), 1, timeout=120)
    check(numbers)
    assert refused == [make.__name__ for make in REFUSED]


def test_what_objects_of_libraries_hold_is_seen(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")
    ((numbers, refused),) = run_ranks(lambda rank: compare_all(HELD), 1, timeout=120)
    check(numbers)
    assert refused == []


def test_what_libraries_read_is_seen_or_refused(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")
    refused = (*library_reads.REFUSED, *library_reads.REFUSED_WITHOUT_NUMBERS)
    cases = (*library_reads.SEEN, *refused)
    ((numbers, found),) = run_ranks(lambda rank: compare_all(cases), 1, timeout=120)
    assert found == [make.__name__ for make in refused]
    for make in library_reads.REFUSED_WITHOUT_NUMBERS:
        del numbers[make.__name__]
    check(numbers)


@pytest.mark.parametrize("reads", [class_reads, function_reads])
def test_what_classes_and_functions_hold_is_seen_or_refused(monkeypatch, reads):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")
    cases = (*reads.SEEN, *reads.REFUSED)
    ((numbers, refused),) = run_ranks(lambda rank: compare_all(cases), 1, timeout=120)
    check(numbers)
    assert refused == [make.__name__ for make in reads.REFUSED]


def test_the_place_of_a_batch_in_its_memory_is_seen(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    class Places(keras.layers.Layer):
        def call(self, x):
            return x * (1.0 + x.storage_offset())

    def work(jit):
        model = keras.Sequential([Places()])
        model.compile(jit_compile=jit)
        memory = torch.ones(15)
        batches = [memory[:12].view(4, 3)] * 4 + [memory[3:].view(4, 3)] * 4
        return [float(model.predict_on_batch(batch).mean()) for batch in batches]

    def program(rank):
        shardcore.install("single")
        return work(False), work("auto")

    ((eager, captured),) = run_ranks(program, 1)
    assert captured == eager == [1.0] * 4 + [4.0] * 4


def test_the_error_that_is_handled_is_seen(monkeypatch):
    monkeypatch.setenv("SHARDCORE_CAPTURE", "at-once")

    def work(jit):
        model = keras.Sequential([Reads(lambda: 1.0 + ("of a test" in text_of_error()))])
        model.compile(jit_compile=jit)
        numbers = [float(np.mean(model.predict_on_batch(BATCH))) for _ in range(4)]
        try:
            raise ValueError("of a test")
        except ValueError:
            return numbers + [float(np.mean(model.predict_on_batch(BATCH))) for _ in range(4)]

    def program(rank):
        shardcore.install("single")
        return work(False), work("auto")

    ((eager, captured),) = run_ranks(program, 1)
    assert captured == eager == [1.0] * 4 + [2.0] * 4
