"""Sessions: the state of a Keras distribution on this process, with its mesh and strategy."""

import threading
import weakref
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import keras
import torch

from shardcore.binding import keras_private
from shardcore.binding.layouts import rules_of
from shardcore.binding.metric_sums import MetricSums
from shardcore.binding.trainer_run import TrainerRun
from shardcore.binding.types import Distribution, TorchStrategy
from shardcore.domain.cost.collective_cost import crossing_warning
from shardcore.domain.errors import CallProblem
from shardcore.domain.layouts.layout import Layout
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import Match
from shardcore.domain.layouts.spec import entry_axes
from shardcore.ports import contract
from shardcore.ports.strategy import NewVariable, StrategyEntry
from shardcore.ports.world import Processes, World
from shardcore.reporting.logs import log_of

logger = log_of("session")


@attrs.frozen(eq=False)
class Session:
    """The state of one distribution: its mesh, its strategy, and the checks so far.

    Attributes:
        runs: Those of the process: see `Sessions`.
        output_paths: The layers whose outputs a rule names.
        used_rules: The keys of the rules by which variables were built, of all models.
        packed: The layouts of packed kernels, by path.
        checked: The models that the ranks have compared, and whose rules were checked.
        adopted: The layers whose variables of before the distribution are laid out.
        warnings: The one-time warnings that were given.
        declared: The rules of operators that were declared since: a step that was captured before
            runs the operator as it did then, and is captured again.
        arrays: The memory of the tensors of sample-weight arrays.
        inputs: The plain inputs of a loop outside `fit` since its last update, described.
        compared: How many calls of a layer, and updates of an optimizer, were compared in a loop.
    """

    distribution: Distribution = attrs.field(repr=False)
    world: World
    strategy: TorchStrategy
    processes: Processes
    entry: StrategyEntry = attrs.field(repr=False)
    runs: list[TrainerRun] = attrs.field(repr=False)
    output_paths: set[str] = attrs.field(factory=set, init=False, repr=False)
    used_rules: set[str] = attrs.field(factory=set, init=False, repr=False)
    packed: dict[str, Layout] = attrs.field(factory=dict, init=False, repr=False)
    checked: "weakref.WeakSet[Any]" = attrs.field(factory=weakref.WeakSet, init=False, repr=False)
    adopted: "weakref.WeakSet[Any]" = attrs.field(factory=weakref.WeakSet, init=False, repr=False)
    warnings: set[str] = attrs.field(factory=set, init=False, repr=False)
    declared: set[str] = attrs.field(factory=set, init=False, repr=False)
    arrays: "weakref.WeakSet[Any]" = attrs.field(factory=weakref.WeakSet, init=False, repr=False)
    inputs: dict[str, str] = attrs.field(factory=dict, init=False, repr=False)
    compared: "weakref.WeakKeyDictionary[Any, int]" = attrs.field(
        factory=weakref.WeakKeyDictionary, init=False, repr=False
    )

    def __deepcopy__(self, memo: dict[int, object]) -> "Session":
        """Keeps a copy of a variable in the same session."""
        return self

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layouts."""
        return self.world.mesh

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that shard the batch, the major first."""
        return entry_axes(self.distribution.batch_dim_name)

    @property
    def batch_shards(self) -> int:
        """The number of parts of a batch."""
        return self.mesh.size_along(self.batch_axes)

    def batch_layout(self, ndim: int) -> Layout:
        """Lays out a batch with `ndim` dims: its rows are sharded over the batch axes."""
        return Layout(self.mesh, (self.batch_axes, *(None,) * (ndim - 1)))

    def create_tensor(self, value: torch.Tensor, storage: Layout, new: NewVariable) -> torch.Tensor:
        """Lets the strategy store the full value of a new variable, and checks what it gives."""
        position = self.world.position
        return contract.create_tensor(self.entry, self.strategy, value, storage, new, position)

    def from_local(
        self, part: torch.Tensor, layout: Layout, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Joins the ranks' parts without communication; `shape` is global. Checks the result."""
        return contract.join_parts(self.entry, self.strategy, part, layout, shape)

    def keras_layout(self, layout: Layout) -> Any:
        """Wraps `layout` in a Keras `TensorLayout` on the distribution's mesh."""
        return keras.distribution.TensorLayout(layout.spec, self.distribution.device_mesh)

    def rule(self, path: str) -> Match[Any] | None:
        """Looks up the layout map's rule for `path`, None without one, or without a layout map."""
        layout_map = keras_private.layout_map_of(self.distribution)
        return None if layout_map is None else rules_of(layout_map).match(path)


@attrs.define
class Sessions:
    """The sessions of this process, one per distribution.

    Its distribution and its variables refer to a session, so that all of them are freed together.

    Attributes:
        runs: The running fits, evaluates, predicts and steps, the innermost last.
        is_closed: Whether shardcore was uninstalled.
        has_warned: Whether a step has warned that this job has no distribution.
        crossings: The warnings that were given about mesh axes that cross hosts.
        sums: The deferred sums of metrics.
        edges: The edges of torch modules.
        arrays: The memory of the tensors of sample-weight arrays, of steps on one device.
    """

    entry: StrategyEntry
    processes: Processes
    runs: list[TrainerRun] = attrs.field(factory=list, init=False)
    is_closed: bool = attrs.field(default=False, init=False)
    has_warned: bool = attrs.field(default=False, init=False)
    crossings: set[str] = attrs.field(factory=set, init=False)
    sums: MetricSums = attrs.field(factory=MetricSums, init=False)
    edges: "weakref.WeakKeyDictionary[Any, Any]" = attrs.field(
        factory=weakref.WeakKeyDictionary, init=False
    )
    arrays: "weakref.WeakSet[Any]" = attrs.field(factory=weakref.WeakSet, init=False)
    _strategies: dict[World, TorchStrategy] = attrs.field(factory=dict, init=False)
    _alive: "weakref.WeakSet[Session]" = attrs.field(factory=weakref.WeakSet, init=False)

    def current(self) -> Session | None:
        """Looks up the session of the distribution that is set on this thread, or None."""
        distribution = keras.distribution.distribution()
        return None if distribution is None else self.of(distribution)

    def shared(self) -> Session | None:
        """Looks up the session of this thread if several ranks share it, else None."""
        session = self.current()
        return None if session is None or session.mesh.size == 1 else session

    def required(self) -> Session:
        """Looks up the session of this thread.

        Raises:
            CallProblem: If no distribution is set on it.
        """
        session = self.current()
        if session is None:
            raise CallProblem(
                "No distribution is set on this thread: call keras.distribution."
                "set_distribution(...) first, or work inside distribution.scope()."
            )
        return session

    def of(self, distribution: Distribution) -> Session:
        """Creates the session of `distribution` at the first call, and after an uninstall."""
        session: Session | None = getattr(distribution, "_shardcore_session", None)
        if session is None or session not in self._alive:
            world = distribution.device_mesh.backend_mesh
            strategy = self.strategy(world)
            session = Session(distribution, world, strategy, self.processes, self.entry, self.runs)
            distribution._shardcore_session = session
            self._alive.add(session)
            kind = type(distribution).__name__
            logger.debug("distribution set: %s over mesh %s", kind, world.mesh)
            self._warn_of_hosts(world, session.batch_axes)
        return session

    def _warn_of_hosts(self, world: World, batch_axes: Collection[str]) -> None:
        """Warns once of each axis that crosses hosts, if they are known.

        Axes that shard the batch may: what moves along them can be sent beside the computation.
        """
        for axis in world.mesh.axis_names if self.processes.hosts else ():
            warning = crossing_warning(world.mesh, axis, world.processes, self.processes.hosts)
            if warning and axis not in batch_axes and warning not in self.crossings:
                self.crossings.add(warning)
                logger.warning(warning)

    def are_served(self) -> bool:
        """Tells whether a strategy serves models now, with or without a distribution."""
        return self.current() is not None or self.entry.serves_one_device

    def warn_without_distribution(self) -> None:
        """Warns once if the processes of a job each run a model by themselves."""
        if not self.has_warned and self.processes.launched > 1:
            self.has_warned = True
            logger.warning(
                "No distribution is set: each of the %d processes runs the full model by itself. "
                "To share the work: keras.distribution.set_distribution("
                "keras.distribution.DataParallel()).",
                self.processes.launched,
            )

    def strategy(self, world: World) -> TorchStrategy:
        """Opens the strategy on `world` at the first call; it stays open until `close`."""
        if world not in self._strategies:
            self._strategies[world] = contract.open_strategy(self.entry, world)
        return self._strategies[world]

    def are_open(self) -> bool:
        """Tells whether there may be sharded tensors: a strategy was opened."""
        return bool(self._strategies)

    def declare_rule(self, call: str) -> None:
        """Compares the rule of an operator on all ranks, if there may be sharded tensors.

        `call` is that of `operator_rule`. Rules that are declared before are compared when a
        strategy is opened.
        """
        if self.are_open():
            self.processes.barrier(call)
        for session in self._alive:
            session.declared.add(call)

    def strategy_without_distribution(self) -> TorchStrategy | None:
        """Chooses the newest strategy, for a thread without a distribution; None on others."""
        if not self._strategies or keras.distribution.distribution() is not None:
            return None
        return next(reversed(self._strategies.values()))

    def session_of_model(self, model: keras.Model) -> Session | None:
        """Finds the session of the first variable of `model` that is laid out, None without one."""
        variables = model.variables if self._alive else ()
        sessions = (keras_private.storage_of(variable).session for variable in variables)
        return next((session for session in sessions if session in self._alive), None)

    def scope_of(self, model: keras.Model) -> AbstractContextManager[Any]:
        """Opens the scope in which a sharded `model` was built, if none is open."""
        session = None if self.current() else self.session_of_model(model)
        if session is None:
            return nullcontext()
        if threading.current_thread() is not threading.main_thread():
            raise CallProblem(
                f"A step of model {model.name!r}, whose variables are sharded, was begun on thread "
                f"{threading.current_thread().name!r}, which has no distribution: run fit, "
                "evaluate and predict on the main thread; or, if that waits meanwhile, inside "
                "`with distribution.scope():` here, after a first step on the main thread."
            )
        scope: AbstractContextManager[Any] = session.distribution.scope()
        return scope

    def strategy_of_tensor(self, value: object) -> TorchStrategy | None:
        """Finds the strategy that owns `value`, None if it is plain or no tensor."""
        if not isinstance(value, torch.Tensor):
            return None
        return next((s for s in self._strategies.values() if s.owns(value)), None)

    def run(self) -> TrainerRun | None:
        """Looks up the innermost running fit, evaluate, predict or step, None outside."""
        return self.runs[-1] if self.runs else None

    @contextmanager
    def working(self, trainer: keras.Model) -> Iterator[TrainerRun]:
        """Registers a fit, evaluate, predict or step of `trainer` while it runs."""
        run = TrainerRun(trainer)
        self.runs.append(run)
        try:
            with run.at_end, self.sums.run(run):
                yield run
        finally:
            self.runs.remove(run)

    def collective_call(self, call: str) -> AbstractContextManager[None]:
        """Opens a context for a call that needs all ranks, such as "fit() of model 'net'".

        On a thread that is not the main one it has no order among the ranks: that is the user's.
        """
        is_main = threading.current_thread() is threading.main_thread()
        return self.processes.collective_call(call) if is_main else nullcontext()

    def close(self) -> None:
        """Drops all sessions and strategies for good."""
        self.is_closed = True
        self._alive.clear()
        self._strategies.clear()
