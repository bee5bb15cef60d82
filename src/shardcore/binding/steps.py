"""Seam: the trainer. A batch is split before a step, and what the step returns is whole."""

import weakref
from collections.abc import Callable
from typing import Any

import attrs

from shardcore.binding import agreement, batches, rules, seams
from shardcore.binding.session import Session, Sessions


@attrs.frozen
class Steps:
    """The members of `TorchTrainer` and its helpers that shardcore replaces."""

    sessions: Sessions

    def maker(self, function_name: str) -> Callable[[Any], Callable[..., Any]]:
        """A replacement for `make_train_function` and its kind.

        Args:
            function_name: Where the trainer keeps what it makes: "train_function".
        """

        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def make(trainer: Any, force: bool = False) -> Any:
                kept = getattr(trainer, function_name)
                result = original(trainer, force=force)
                made = getattr(trainer, function_name)
                if made is not kept:
                    setattr(trainer, function_name, _Step(self.sessions, trainer, made))
                return result

            return make

        return replace

    def epoch(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`TorchEpochIterator._get_iterator`: every process makes as many steps."""

        def _get_iterator(iterator: Any) -> Any:
            session = self.sessions.current()
            if session is not None:
                steps = iterator.num_batches
                agreement.compare({"steps per epoch": str(steps)}, session)
            return original(iterator)

        return _get_iterator

    def progress(
        self, original: Callable[[Any, dict[str, Any]], None]
    ) -> Callable[[Any, dict[str, Any]], None]:
        """`ProgbarLogger.set_params`: shown by rank 0."""

        def set_params(logger: Any, params: dict[str, Any]) -> None:
            original(logger, params)
            session = self.sessions.current()
            if session is not None and session.processes.rank != 0:
                logger.verbose = 0

        return set_params


@attrs.frozen(eq=False)
class _Step:
    """A train, test or predict function over the global batch."""

    sessions: Sessions
    trainer: Any
    function: Callable[[Any], Any]
    checked: "weakref.WeakSet[Session]" = attrs.field(factory=weakref.WeakSet, init=False)

    def __call__(self, data: Any) -> Any:
        session = self.sessions.current()
        if session is None:
            return self.function(data)
        first = session not in self.checked
        with session.strategy.scope():
            if first:
                agreement.check_model(self.trainer, data, session)
            outputs = self.function(batches.distribute(data, session))
            if first:
                self.checked.add(session)
                rules.warn_of_rules(self.trainer, session)
            # Callbacks read logs on a thread of their own: no collective may be left to them.
            return self._whole(outputs, session)

    def _whole(self, outputs: Any, session: Session) -> Any:
        return seams.map_tensors(session.strategy.whole, outputs)
