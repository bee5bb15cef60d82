"""Sharded checkpoints: the main thread copies, other threads write, all ranks agree (ADR 31)."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import attrs
import keras

from shardcore.binding.checkpoints import state
from shardcore.binding.checkpoints.collective_ranks import Ranks
from shardcore.binding.checkpoints.loading import Restore
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.ranks.session import Sessions
from shardcore.domain.checkpoints.contents import divide, pieces_of_rank
from shardcore.domain.checkpoints.index import Index
from shardcore.domain.errors import CheckpointError
from shardcore.ports.checkpoints import CheckpointStore, Commit, Lease, PendingSave


@attrs.frozen(eq=False)
class SaveRequest:
    """A checkpoint that is to be saved.

    Args:
        directory: The directory of all checkpoints, an absolute path.
        model: The built model.
        step: The training step.
        state: What is saved besides tensors and generators, as JSON; equal on all ranks.
        keep: How many complete checkpoints to keep; None for all.
        arrays: Further tensors, equal on all ranks.
        lease: The lease of the directory, on the rank that commits; None to ask for it.

    Raises:
        CheckpointError: If no checkpoint would be kept.
    """

    directory: Path
    model: keras.Model
    step: int
    state: Mapping[str, object]
    keep: int | None = None
    arrays: Iterable[StateTensor] = ()
    lease: Lease | None = None

    def __attrs_post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise CheckpointError(
                f"Expected keep of at least 1, or None for all, got {self.keep}.",
                got=str(self.keep),
            )


@attrs.frozen(eq=False)
class Saving:
    """A checkpoint that is being written.

    Args:
        path: The folder that it gets when it is complete.
    """

    path: Path
    _pending: PendingSave
    _ranks: Ranks

    def finish(self) -> Path:
        """Waits until the checkpoint is complete. A collective.

        Returns:
            Its folder.

        Raises:
            CheckpointError: If a file does not come.
            OSError: If a rank cannot write; on all ranks.
        """
        what = f"write checkpoint {str(self.path)!r}"
        try:
            self._ranks.run(self._pending.wait_for_file, what)
            self._ranks.run(self._pending.wait_for_commit, what)
        except BaseException:
            self._pending.cancel()
            raise
        return self.path


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
    ) -> Saving:
        """Begins a save, as `begin` does. A collective."""
        return self.begin(SaveRequest(Path(directory).absolute(), model, step, state, keep))

    def begin(self, request: SaveRequest) -> Saving:
        """Copies this rank's part of a checkpoint, and begins to write it. A collective."""
        ranks = Ranks.of_model(request.model, self.sessions, "save_checkpoint")
        tensors = [*state.tensors_of(request.model, ranks.session), *request.arrays]
        variables = divide(tensor.to_store() for tensor in tensors)
        content = {**request.state, "generators": state.generators()}
        mesh, versions = state.mesh_of(ranks.session), self.versions
        index = Index(request.step, str(mesh), versions, tuple(variables), (), content)
        ranks.compare(
            {
                "checkpoint directory": str(request.directory),
                "checkpoint step": str(request.step),
                "checkpoint content": str(variables),
                "checkpoint state": str(index.state),
            }
        )
        with ExitStack() as after_error:
            lease, folder = self._begin_folder(request, ranks, after_error)
            layouts = (tensor.layout for tensor in tensors)
            own_pieces = pieces_of_rank(zip(variables, layouts, strict=True), ranks.position)
            contents = state.contents({tensor.name: tensor for tensor in tensors}, own_pieces)
            commit = None if lease is None else Commit(index, mesh.size, request.keep, lease)
            pending = self.store.write(folder, ranks.position, list(contents), commit)
            after_error.pop_all()
        return Saving(self.store.path(request.directory, request.step), pending, ranks)

    def _begin_folder(
        self, request: SaveRequest, ranks: Ranks, after_error: ExitStack
    ) -> tuple[Lease | None, Path]:
        """Makes the new folder, on the rank that commits and under its lease."""
        lease = None if request.lease is None else request.lease.use()
        if lease is not None:
            after_error.callback(lease.release)

        def make() -> tuple[Lease | None, Path | None]:
            if ranks.position != 0:
                return None, None
            own = lease
            if own is None:
                own = self.store.lease(request.directory)
                after_error.callback(own.release)
            return own, self.store.begin(own, request.step)

        own, made = ranks.run(make, f"begin a checkpoint in {str(request.directory)!r}")
        return own, next(path for path in ranks.gather(made) if path)

    def lease(self, directory: str | os.PathLike[str]) -> Lease | None:
        """Asks for the lease of a directory; None on ranks that do not commit. A collective.

        Raises:
            CheckpointError: On all ranks, if another job has it.
        """
        path, ranks = Path(directory).absolute(), Ranks(self.sessions.current())
        return ranks.run(
            lambda: self.store.lease(path) if ranks.position == 0 else None,
            f"write checkpoints into {str(path)!r}",
        )

    def load(
        self, path: str | os.PathLike[str], model: keras.Model, strict: bool = True
    ) -> Restore:
        """Loads a checkpoint into a built model. A collective.

        Args:
            path: The folder of a checkpoint, or the directory of several, for the newest complete
                one.
            model: The model, under the distribution that it has to have.
            strict: Whether all variables have to fit; else those that fit are loaded.

        Raises:
            CheckpointError: On all ranks, before a value of the model has changed.
        """
        ranks = Ranks.of_model(model, self.sessions, "load_checkpoint")
        folder = self._find(Path(path).absolute(), ranks)
        restore = Restore(folder, self._index(folder, ranks), model, ranks.session)
        restore.match(strict)
        count = state.mesh_of(ranks.session).size
        with self.store.reading(folder, restore.index, ranks.position, count) as reader:
            ranks.run(partial(restore.check, reader), f"check checkpoint {str(folder)!r}")
            ranks.run(partial(restore.read, reader), f"read checkpoint {str(folder)!r}")
        return restore

    def _find(self, path: Path, ranks: Ranks) -> Path:
        what = f"look for a checkpoint in {str(path)!r}"
        folder = ranks.choose(partial(self.store.find, path), what)
        if folder is None:
            raise CheckpointError(
                f"{str(path)!r} is no complete checkpoint and has none: give a folder that "
                "shardcore.save_checkpoint() has returned, or the directory that it was given.",
                name=str(path),
            )
        return folder

    def _index(self, folder: Path, ranks: Ranks) -> Index:
        """Reads the index on every rank, and compares it: hosts may see other files."""
        name = f"checkpoint {str(folder)!r}"
        index = ranks.run(partial(self.store.index, folder), f"read the index of {name}")
        digest = hashlib.sha256(index.to_text().encode()).hexdigest()
        ranks.compare({name: f"index {digest[:12]}"})
        return index

    def latest(self, directory: str | os.PathLike[str]) -> Path | None:
        """Finds the newest complete checkpoint, None without one. A collective."""
        path, ranks = Path(directory).absolute(), Ranks(self.sessions.current())
        return ranks.choose(
            partial(self.store.latest, path), f"look for checkpoints in {str(path)!r}"
        )
