"""Seam: files. One rank writes, all ranks bring their shards, one variable at a time."""

import io
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import attrs

from shardcore.binding import seams
from shardcore.binding.collective_errors import raise_on_all_ranks
from shardcore.binding.session import Sessions


@attrs.frozen
class Saving:
    """The functions of `keras.src.saving.saving_lib` that write, called on every rank."""

    sessions: Sessions

    def save_model(self, original: Callable[..., None]) -> Callable[..., None]:
        """`save_model(model, filepath, weights_format, zipped)`."""

        @wraps(original)
        def save_model(
            model: Any, filepath: Any, weights_format: str = "h5", zipped: bool = True
        ) -> None:
            def write(path: Any) -> None:
                original(model, path, weights_format=weights_format, zipped=zipped)

            self._save(model, filepath, write, lambda: seams.gather_model(model), zipped)

        return save_model

    def save_weights(self, original: Callable[..., None]) -> Callable[..., None]:
        """`save_weights_only(model, filepath, max_shard_size, objects_to_skip)`."""

        @wraps(original)
        def save_weights_only(
            model: Any, filepath: Any, max_shard_size: Any = None, objects_to_skip: Any = None
        ) -> None:
            def write(path: Any) -> None:
                original(model, path, max_shard_size, objects_to_skip)

            def attend() -> None:
                seams.gather_state(model, objects_to_skip)

            self._save(model, filepath, write, attend, one_file=max_shard_size is None)

        return save_weights_only

    def ask(self, original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """`ask_to_proceed_with_overwrite`: rank 0 asks, its answer counts on all ranks."""

        def ask_to_proceed_with_overwrite(filepath: Any) -> bool:
            session = self.sessions.current()
            if session is None:
                return original(filepath)
            session.processes.meet(f"the question whether to overwrite {filepath}")
            answer = original(filepath) if session.processes.rank == 0 else None
            return bool(session.processes.gather(answer)[0])

        return ask_to_proceed_with_overwrite

    def message(self, original: Callable[..., None]) -> Callable[..., None]:
        """`print_msg`: rank 0 prints."""

        @wraps(original)
        def print_msg(message: Any, line_break: bool = True) -> None:
            session = self.sessions.current()
            if session is None or session.processes.rank == 0:
                original(message, line_break)

        return print_msg

    def _save(
        self,
        model: Any,
        filepath: Any,
        write: Callable[[Any], None],
        attend: Callable[[], None],
        one_file: bool,
    ) -> None:
        """Write on rank 0 while the others attend; go on when it is there, or fail together.

        Each rank writes where nothing is sharded, or into a buffer of its own.
        """
        session = self.sessions.current() or self.sessions.keeping(model)
        if session is None or session.mesh.size == 1 or isinstance(filepath, io.IOBase):
            write(filepath)
            return
        path, rank = str(filepath), session.processes.rank

        def work() -> None:
            if rank != 0:
                attend()
            elif one_file and not seams.is_remote(path):
                write_then_rename(path, write)
            else:
                write(path)

        session.processes.meet(f"saving {path!r}")
        raise_on_all_ranks(work, f"save {path!r}", session, self.sessions)


def write_then_rename(path: str, write: Callable[[Any], None]) -> None:
    """A reader finds the old file or the new one, never a part."""
    target = Path(path)
    unfinished = target.with_name(f".unfinished-{target.name}")  # keeps the ending, which counts
    try:
        write(str(unfinished))
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
