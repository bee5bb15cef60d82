"""Reads through libraries: of files that are written, digests, flags and generators."""

import hashlib
import shlex
import tempfile
import uuid

import keras
import numpy as np
import zmq
from absl import flags


def _log(mode="w"):
    return tempfile.TemporaryFile(mode, encoding="utf-8")


def beside_writes_to_a_file():
    file, rates = _log(), [1.0]

    def read():
        file.write("a line\n")
        print("another", file=file)
        return rates[0]

    return read, lambda: rates.__setitem__(0, 2.0)


def the_encoding_of_a_file():
    file = _log()
    return lambda: float(len(file.encoding)), lambda: file.reconfigure(encoding="latin-1")


def whether_a_file_is_closed():
    file = _log()
    return lambda: 1.0 + file.closed, file.close


def an_attribute_of_a_file():
    file = _log()
    file.rate = 1.0
    return lambda: file.rate, lambda: setattr(file, "rate", 2.0)


def digests():
    texts = ["a"]

    def read():
        digest = hashlib.sha256(texts[0].encode()).digest()[0]
        return float(digest + hashlib.blake2b(texts[0].encode()).digest()[0])

    return read, lambda: texts.__setitem__(0, "b")


def an_identifier_of_a_name():
    names = ["a"]
    return (
        lambda: float(uuid.uuid5(uuid.NAMESPACE_DNS, names[0]).int % 7),
        lambda: names.__setitem__(0, "b"),
    )


def the_words_of_a_text():
    texts = ["one"]
    return lambda: float(len(shlex.split(texts[0]))), lambda: texts.__setitem__(0, "one two")


def a_flag():
    values = flags.FlagValues()
    flags.DEFINE_float("rate", 1.0, "", flag_values=values)
    values.mark_as_parsed()
    return lambda: values.rate, lambda: setattr(values, "rate", 2.0)


def beside_names_of_random_functions():
    """`np.random` has functions of these names too."""
    rates = [1.0]

    def read():
        drawn = keras.random.normal((1,), seed=1) + keras.random.uniform((1,), seed=1)
        return drawn * np.sqrt(rates[0])

    return read, lambda: rates.__setitem__(0, 4.0)


def a_generator_of_a_seed():
    seeds = [1]
    return lambda: np.random.default_rng(seeds[0]).normal(), lambda: seeds.__setitem__(0, 2)


def the_position_of_a_file():
    file = _log()
    return lambda: 1.0 + file.tell(), lambda: file.write("abc")


def the_lines_of_a_file():
    file = _log("w+")

    def change():
        file.write("abc\n")
        file.seek(0)

    return lambda: 1.0 + sum(1 for _ in file), change


def a_digest_that_is_held():
    held = hashlib.sha256()
    return lambda: float(held.digest()[0]), lambda: held.update(b"more")


def a_generator_without_a_seed():
    return lambda: np.random.default_rng().normal(), lambda: None


def a_message_of_a_socket():
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sender.bind("inproc://of-a-test")
    receiver.connect("inproc://of-a-test")

    def read():
        sender.send(b"1")
        return float(receiver.recv())

    return read, lambda: sender.send(b"2"), context.destroy


SEEN = (
    beside_writes_to_a_file,
    the_encoding_of_a_file,
    whether_a_file_is_closed,
    an_attribute_of_a_file,
    digests,
    an_identifier_of_a_name,
    the_words_of_a_text,
    a_flag,
    beside_names_of_random_functions,
    a_generator_of_a_seed,
)
REFUSED = (the_position_of_a_file, a_digest_that_is_held)
# They give other numbers in each step, so no two programs agree.
REFUSED_WITHOUT_NUMBERS = (
    the_lines_of_a_file,
    a_generator_without_a_seed,
    a_message_of_a_socket,
)
