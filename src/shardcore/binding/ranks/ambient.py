"""Patches: a thread is in the scope of its distribution, also outside `fit` (ADR 3)."""

import threading
import weakref
from contextlib import ExitStack

import attrs
import keras

from shardcore.binding import keras_private
from shardcore.binding.keras_private.patches import replaces
from shardcore.binding.ranks.session import Sessions
from shardcore.binding.types import Original
from shardcore.domain.errors import CallProblem
from shardcore.domain.scope import Scope

# Whether this thread sets no distribution: it builds a model for a plan.
ignoring_distributions = Scope("ignoring_distributions", default=False)


@attrs.frozen(eq=False)
class AmbientScope:
    """The scope of the distribution that is set on a thread: plain tensors mix with sharded ones.

    Keras enters it nowhere, so it opens and closes as the distribution is set.
    """

    sessions: Sessions
    # Of a thread: at the exit of the process no scope is closed after torch is unloaded.
    _here: threading.local = attrs.field(factory=threading.local, init=False)
    _inside: "weakref.WeakSet[threading.Thread]" = attrs.field(factory=weakref.WeakSet, init=False)

    @replaces(
        "keras.src.backend.common.global_state:set_global_attribute",
        reason="set_distribution() and scope() end here, under whatever name they were imported: "
        "plain tensors mix with sharded ones from here on; the mesh is made here.",
    )
    def set_global_attribute(self, original: Original, name: str, value: object) -> None:
        """Replaces `set_global_attribute`; a distribution that cannot be followed is not set."""
        if name != keras_private.CURRENT_DISTRIBUTION:
            original(name, value)
            return
        if ignoring_distributions.now():
            return
        before = keras.distribution.distribution()
        original(name, value)
        try:
            self.follow()
        except BaseException:
            original(name, before)
            self.follow()
            raise

    @replaces(
        "keras.src.backend.common.global_state:clear_session",
        reason="Drops the distribution silently.",
        everywhere=True,
    )
    def clear_session(self, original: Original, free_memory: bool = True) -> None:
        """Replaces `clear_session`, after which no distribution is set."""
        original(free_memory)
        self.follow()

    def follow(self) -> None:
        """Enters the scope of the distribution that is set on this thread, and no other."""
        self.leave()
        session = self.sessions.current()
        if session is not None:
            self._here.scope = ExitStack()
            self._here.scope.enter_context(session.strategy.implicit_replication())
            self._inside.add(threading.current_thread())

    def leave(self) -> None:
        """Leaves the scope of this thread, if it is in one."""
        scope = getattr(self._here, "scope", None)
        if scope is not None:
            self._here.scope = None
            self._inside.discard(threading.current_thread())
            scope.close()

    def check_threads(self) -> None:
        """Refuses while another thread has a distribution: its state cannot be reset from here."""
        here = threading.current_thread()
        others = [
            thread.name for thread in self._inside if thread is not here and thread.is_alive()
        ]
        if others:
            raise CallProblem(
                f"uninstall() was called while thread {others[0]!r} has a distribution: leave its "
                "scope there, or set_distribution(None), first.",
                name=others[0],
            )
