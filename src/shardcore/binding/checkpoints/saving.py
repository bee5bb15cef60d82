"""Saves a checkpoint: the main thread copies, other threads write, all ranks agree (ADR 31)."""

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import attrs
import keras

from shardcore.binding.checkpoints import state
from shardcore.binding.checkpoints.state import StateTensor
from shardcore.binding.engine import adoption
from shardcore.binding.ranks import rank_consistency
from shardcore.binding.ranks.collective_errors import raise_on_all_ranks
from shardcore.binding.ranks.session import Session, Sessions
from shardcore.domain.checkpoints.contents import divide, pieces_of_rank
from shardcore.domain.checkpoints.index import Index
from shardcore.domain.errors import CallProblem
from shardcore.ports.checkpoints import CheckpointStore, Commit, Lease, PendingSave


@attrs.frozen(eq=False)
class Saving:
    """A checkpoint that is being written.

    Args:
        path: The folder that it gets when it is complete.
    """

    path: Path
    pending: PendingSave
    session: Session | None
    sessions: Sessions

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
            run_collectively(self.pending.wait_for_file, what, self.session, self.sessions)
            run_collectively(self.pending.wait_for_commit, what, self.session, self.sessions)
        except BaseException:
            self.pending.cancel()
            raise
        return self.path


def begin(
    directory: Path,
    model: keras.Model,
    step: int,
    own_state: Mapping[str, object],
    arrays: Iterable[StateTensor],
    keep: int | None,
    versions: Mapping[str, str],
    sessions: Sessions,
    store: CheckpointStore,
    lease: Lease | None = None,
) -> Saving:
    """Copies this rank's part of a checkpoint, and begins to write it. A collective.

    Args:
        directory: The directory of all checkpoints.
        model: The built model.
        step: The training step.
        own_state: What is saved besides tensors and generators, as JSON; equal on all ranks.
        arrays: Further tensors, equal on all ranks.
        keep: How many complete checkpoints to keep; None for all.
        versions: The releases of the packages in use.
        sessions: The sessions of this process.
        store: The store of checkpoints.
        lease: The lease of the directory, on the rank that commits; None to ask for it.
    """
    session = session_of(model, sessions, "save_checkpoint")
    tensors = [*state.tensors_of(model, session), *arrays]
    variables = divide(tensor.to_store() for tensor in tensors)
    content = {**own_state, "generators": state.generators()}
    mesh = state.ONE_DEVICE if session is None else session.mesh
    index = Index(step, str(mesh), versions, tuple(variables), (), content)
    if session is not None:
        facts = {
            "checkpoint directory": str(directory),
            "checkpoint step": str(step),
            "checkpoint content": str(variables),
            "checkpoint state": str(index.state),
        }
        rank_consistency.compare(facts, session)
    rank = 0 if session is None else session.world.position
    leases: list[Lease] = []
    if lease is not None:
        leases.append(lease.use())
    try:
        folder = _folder(directory, step, rank, leases, session, sessions, store)
        own_pieces = pieces_of_rank(
            zip(variables, (tensor.layout for tensor in tensors), strict=True), rank
        )
        named = {tensor.name: tensor for tensor in tensors}
        commit = Commit(index, mesh.size, keep, leases[0]) if rank == 0 else None
        pending = store.write(folder, rank, list(state.contents(named, own_pieces)), commit)
    except BaseException:
        for lease in leases:
            lease.release()
        raise
    return Saving(store.path(directory, step), pending, session, sessions)


def session_of(model: keras.Model, sessions: Sessions, what: str) -> Session | None:
    """Returns the session of a model, all of whose variables are laid out; None without one.

    A collective: the ranks meet, and deferred sums of metrics are reduced.

    Raises:
        CallProblem: If several ranks have no distribution, or this is another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise CallProblem(
            f"{what}() was called on thread {threading.current_thread().name!r}: all ranks take "
            "part in it, so call it on the main thread.",
            name=threading.current_thread().name,
        )
    session = sessions.current() or sessions.session_of_model(model)
    if session is None:
        if sessions.processes.world_size > 1:
            raise CallProblem(
                f"{what}() was called by {sessions.processes.world_size} processes without a "
                "distribution, each of which has a model by itself: set one first, such as "
                "keras.distribution.set_distribution(keras.distribution.DataParallel())."
            )
        return None
    session.processes.barrier(f"{what}()")
    adoption.adopt(model, session)
    sessions.sums.reduce()
    return session


def _folder(
    directory: Path,
    step: int,
    rank: int,
    leases: list[Lease],
    session: Session | None,
    sessions: Sessions,
    store: CheckpointStore,
) -> Path:
    """Returns the new folder, which rank 0 makes under its lease; asks for one if it has none."""
    folders: list[Path] = []

    def work() -> None:
        if rank == 0:
            if not leases:
                leases.append(store.lease(directory))
            folders.append(store.begin(leases[0], step))

    run_collectively(work, f"begin a checkpoint in {str(directory)!r}", session, sessions)
    if session is None:
        return folders[0]
    return next(paths[0] for paths in session.processes.gather(folders) if paths)


def run_collectively(
    work: Callable[[], None], what: str, session: Session | None, sessions: Sessions
) -> None:
    """Does `work` on all ranks; if it fails on one, all raise its error."""
    if session is None:
        work()
    else:
        raise_on_all_ranks(work, what, session, sessions)
