"""The other end of `jax_lane`: run by the interpreter that has JAX."""

import json
import os
import sys
from typing import Any

from benchmarks.serving import Failure, serve
from benchmarks.training import Training


def take_cores(count: int) -> None:
    """Leave this process a core per device, as each gloo rank has one thread.

    jaxlib 0.10: products take a thread per core that the process may use, whatever
    `--xla_cpu_multi_thread_eigen` says. Cores are counted when JAX is imported, or later.
    """
    if hasattr(os, "sched_setaffinity"):  # not on macOS
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log

    def send(answer: Any) -> None:
        failed = isinstance(answer, Failure)
        reply = {"failure": answer.report} if failed else {"answer": answer}
        print(json.dumps(reply), file=answers, flush=True)

    serve(_make, _receive, send)


def _receive() -> list[Any]:
    return json.loads(sys.stdin.readline() or "[]")


def _make() -> Training:
    from benchmarks import generation, keras_training  # which import JAX
    from benchmarks.cases import Case

    case, layout, work = _receive()
    open_work = {"train": keras_training.train, "generate": generation.generate}[work]
    return open_work(Case(**case), layout, "cpu")


if __name__ == "__main__":
    take_cores(int(sys.argv[1]))
    main()
