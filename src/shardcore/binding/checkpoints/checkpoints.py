"""The functions `save_checkpoint`, `load_checkpoint` and `latest_checkpoint`."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
import keras

from shardcore.binding.checkpoints import loading, saving
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.ranks.session import Sessions
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import CheckpointStore, Lease


@attrs.frozen(eq=False)
class Checkpoints:
    """The checkpoints of this process.

    Args:
        sessions: The sessions.
        store: The store of checkpoints.
        versions: The releases of the packages in use.
    """

    sessions: Sessions
    store: CheckpointStore
    versions: Mapping[str, str]

    def save(
        self,
        directory: str | os.PathLike[str],
        model: keras.Model,
        step: int,
        state: Mapping[str, object],
        keep: int | None = None,
        arrays: Iterable[StateTensor] = (),
        lease: Lease | None = None,
    ) -> saving.Saving:
        """Copies this rank's part of a checkpoint, and begins to write it. A collective."""
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"Expected keep of at least 1, or None for all, got {keep}.", got=str(keep)
            )
        return saving.begin(
            Path(directory).absolute(),
            model,
            step,
            state,
            arrays,
            keep,
            self.versions,
            self.sessions,
            self.store,
            lease,
        )

    def lease(self, directory: str | os.PathLike[str]) -> Lease | None:
        """Returns the lease of a directory, on the rank that commits checkpoints. A collective.

        Raises:
            CheckpointError: On all ranks, if another job has it.
        """
        path, session = Path(directory).absolute(), self.sessions.current()
        leases: list[Lease] = []

        def work() -> None:
            if session is None or session.world.position == 0:
                leases.append(self.store.lease(path))

        saving.run_collectively(
            work, f"write checkpoints into {str(path)!r}", session, self.sessions
        )
        return leases[0] if leases else None

    def load(
        self, path: str | os.PathLike[str], model: keras.Model, strict: bool = True
    ) -> loading.Loading:
        """Loads a checkpoint into a built model. A collective."""
        return loading.load(Path(path).absolute(), model, strict, self.sessions, self.store)

    def latest(self, directory: str | os.PathLike[str]) -> Path | None:
        """Returns the newest complete checkpoint, None without one. A collective."""
        path, session = Path(directory).absolute(), self.sessions.current()
        what = f"look for checkpoints in {str(path)!r}"
        return loading.choose_on_rank_0(
            lambda: self.store.latest(path), what, session, self.sessions
        )
