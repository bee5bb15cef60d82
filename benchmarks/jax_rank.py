"""The other end of `jax_lane`: run by the interpreter that has JAX."""

import json
import os
import sys
from typing import Any

from benchmarks import keras_training
from benchmarks.cases import Case
from benchmarks.serving import Failure, serve
from benchmarks.training import Training


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log

    def send(answer: Any) -> None:
        failed = isinstance(answer, Failure)
        told = {"failure": answer.report} if failed else {"answer": answer}
        print(json.dumps(told), file=answers, flush=True)

    serve(_make, _receive, send)


def _receive() -> list[Any]:
    return json.loads(sys.stdin.readline() or "[]")


def _make() -> Training:
    case, layout = _receive()
    return keras_training.train(Case(**case), layout, "cpu")


if __name__ == "__main__":
    main()
