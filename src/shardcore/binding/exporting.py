"""Seam: `Model.export`. Rank 0 writes the artefact from a whole model; the others bring shards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import keras
import torch

from shardcore.binding import seams, torch_state
from shardcore.binding.collective_errors import raise_on_all_ranks
from shardcore.binding.saving import write_then_rename
from shardcore.binding.session import Session, Sessions

# Formats of one file, which can be renamed when it is complete.
_ONE_FILE = ("litert", "onnx", "torch")


def export(original: Callable[..., None], sessions: Sessions) -> Callable[..., None]:
    """`export(filepath, format, verbose, **options)`, called on every rank."""

    @wraps(original)
    def export(
        model: Any,
        filepath: Any,
        format: str = "tf_saved_model",
        verbose: Any = None,
        **options: Any,
    ) -> None:
        def write(path: Any, verbose: Any = verbose) -> None:
            original(model, path, format=format, verbose=verbose, **options)

        session = sessions.current() or sessions.keeping(model)
        if session is None or session.mesh.size == 1:
            write(filepath)
            return
        path = str(filepath)
        session.processes.meet(f"exporting {path!r}")

        def work() -> None:
            if session.processes.rank == 0:
                _write(path, format, verbose, write)

        with _whole(model, session):
            raise_on_all_ranks(work, f"export {path!r}", session, sessions)

    return export


def _write(path: str, kind: str, verbose: Any, write: Callable[..., None]) -> None:
    if kind not in _ONE_FILE or seams.is_remote(path):
        write(path)
        return
    write_then_rename(path, lambda unfinished: write(unfinished, verbose=False))
    if verbose is None or verbose:
        seams.print_message(f"Saved the exported model at '{path}'.")


@contextmanager
def _whole(model: Any, session: Session) -> Iterator[None]:
    """Rank 0 holds `model` whole, as if it had been built without a distribution. A collective."""
    held: dict[int, torch.Tensor] = {}
    sharded: list[tuple[Any, torch.Tensor]] = []
    for variable in model.variables:
        value = session.strategy.whole(variable._value)
        if session.processes.rank == 0:
            plain = torch.nn.Parameter(value, requires_grad=variable._value.requires_grad)
            held[id(variable._value)] = plain
            sharded.append((variable, variable._value))
            variable._value = plain
    torch_state.replace_tensors(model, held)
    distribution = seams.current_distribution()
    seams.forget_distribution()
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)
        back = {id(variable._value): value for variable, value in sharded}
        torch_state.replace_tensors(model, back)
        for variable, value in sharded:
            variable._value = value
