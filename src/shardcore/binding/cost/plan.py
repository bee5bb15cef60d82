"""Plans: the layout map of a policy, for a built model or a function that builds one."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import keras

from shardcore.binding import keras_private
from shardcore.binding.cost.facts import describe
from shardcore.binding.keras_private.patches import replaces_value
from shardcore.binding.ranks.ambient import ignoring_distributions
from shardcore.binding.ranks.session import Sessions
from shardcore.domain.errors import PolicyError, RuleError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.domain.layouts.spec import DimSpec, dim_spec
from shardcore.policies.rules import PlannedRules, idle_axes
from shardcore.ports.policy import LayerFacts, VariableFacts
from shardcore.ports.types import LayoutLike, MeshLike
from shardcore.reporting.cost.plan import PlanReport, plan_report, warn_of_idle
from shardcore.reporting.cost.ranking import Ranking
from shardcore.reporting.tables import human_bytes

_EDITED = "edited"

Choose = Callable[[LayerFacts, Mesh], PlannedRules]


class Plan(keras.distribution.LayoutMap):  # type: ignore[misc]
    """A `LayoutMap` that knows the variables for which it was made.

    Print it for a table. Its rules may be replaced or deleted: the table shows it. `to_python()`
    returns a program.
    """

    def __init__(
        self,
        device_mesh: keras.distribution.DeviceMesh,
        policy: str,
        variables: Collection[VariableFacts],
        outputs: Collection[str],
        planned: PlannedRules,
    ) -> None:
        super().__init__(device_mesh)
        self.policy = policy
        # Of policy "auto": the predicted costs of all meshes and policies.
        self.ranking: Ranking | None = None
        self._batch_axes = planned.batch_axes
        self._variables = tuple(variables)
        self._outputs = tuple(outputs)
        self._made = {rule.key: rule for rule in planned.rules}
        for rule in self._made.values():
            self[rule.key] = rule.spec

    def __setitem__(self, key: str, layout: LayoutLike) -> None:
        """Sets a rule, replacing one with the same key."""
        before = dict(self._layout_map)
        self._layout_map.pop(key, None)
        try:
            super().__setitem__(key, layout)
        except Exception:
            self._layout_map.update(before)
            raise

    @property
    def mesh(self) -> Mesh:
        """The mesh of its specs."""
        return Mesh(self.device_mesh.shape, self.device_mesh.axis_names)

    @property
    def batch_dim_name(self) -> DimSpec:
        """The mesh axis that shards the batch, or several, as `ModelParallel` takes them."""
        return dim_spec(self._batch_axes)

    def distribute(self) -> None:
        """Sets the distribution that uses the plan; warns of axes over which it shards nothing."""
        specs = [layout.axes for layout in self._layout_map.values()]
        warn_of_idle(self.policy, self.mesh, idle_axes(self.mesh, self._batch_axes, specs))
        distribution = keras.distribution.ModelParallel(
            layout_map=self, batch_dim_name=self.batch_dim_name
        )
        keras.distribution.set_distribution(distribution)

    def report(self) -> PlanReport:
        """Matches its current rules with the variables for which it was made.

        Raises:
            LayoutError: If a rule does not fit a variable.
        """
        reasons = {key: self._reason(key) for key in self}
        return plan_report(
            self.policy, self.mesh, self._variables, self._outputs, self._rules(), reasons
        )

    def summary(self) -> str:
        """Writes the policy, the mesh, the memory of a rank and the predicted step as one line."""
        held = human_bytes(self.report().bytes_here)
        line = f"{self.policy} over mesh {self.mesh}: {held} of variables on a rank"
        return line if self.ranking is None else f"{line}, {self.ranking.prediction()}"

    def to_dict(self) -> dict[str, Any]:
        """The table as plain data, fit for JSON."""
        return self.report().to_dict()

    def to_python(self) -> str:
        """Writes a program that sets the distribution of the plan without this class."""
        shape, axis_names = tuple(self.mesh.shape), tuple(self.mesh.axis_names)
        lines = [
            f"# policy {self.policy!r} over mesh {self.mesh}",
            "import shardcore",
            "",
            "shardcore.install()",
            "import keras",
            "",
            f"device_mesh = keras.distribution.DeviceMesh({shape!r}, {axis_names!r})",
            "layout_map = keras.distribution.LayoutMap(device_mesh)",
        ]
        for key, layout in self._layout_map.items():
            text = f'r"{key}"' if "\\" in key and '"' not in key else repr(key)
            lines.append(f"layout_map[{text}] = {layout.axes!r}  # {self._reason(key)}")
        lines += [
            "distribution = keras.distribution.ModelParallel(",
            f"    layout_map=layout_map, batch_dim_name={self.batch_dim_name!r}",
            ")",
            "keras.distribution.set_distribution(distribution)",
        ]
        return "\n".join(lines) + "\n"

    def check(self, model_name: str, paths: Collection[str]) -> None:
        """Refuses a model for which the plan was not made.

        Raises:
            RuleError: If no rule matches any of the model's variables.
        """
        rules = self._rules()
        if not rules or not paths or any(rules.match(path) for path in paths):
            return
        raise RuleError(
            f"No rule of the plan matches a variable of model {model_name!r}: the plan was made "
            f"for {_first_three(variable.path for variable in self._variables)}, the model has "
            f"{_first_three(paths)}. "
            "Keras numbers generated names, so a second build has other paths: plan by the "
            "function that builds the model, shardcore.plan(build, mesh), then call build(), or "
            "name the model and its layers. A model from a file has other paths too, if it is a "
            "Sequential: shardcore.plan(lambda: keras.models.load_model(path), mesh).",
            name=model_name,
        )

    def _rules(self) -> PathRules[Any]:
        return PathRules({key: layout.axes for key, layout in self._layout_map.items()})

    def _reason(self, key: str) -> str:
        rule = self._made.get(key)
        same = rule is not None and rule.spec == tuple(self._layout_map[key].axes)
        return rule.reason if same and rule is not None else _EDITED

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        return f"<Plan by policy {self.policy!r} over mesh {self.mesh}: {len(self)} rules>"

    def __rich__(self) -> Any:
        return self.report().table()


def _first_three(paths: Iterable[str]) -> str:
    listed = list(paths)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")


def make_plan(
    model: object, mesh: MeshLike, policy: str, choose: Choose, sessions: Sessions | None
) -> Plan:
    """Plans for `model`, a built model or a function that builds one on the meta device.

    `sessions` are those of the installation, None without one.
    """
    device_mesh = _device_mesh(mesh)
    facts = facts_of(model, sessions)
    planned = choose(facts, Mesh(device_mesh.shape, device_mesh.axis_names))
    return plan_of(facts, device_mesh, policy, planned)


def facts_of(model: object, sessions: Sessions | None) -> LayerFacts:
    """Describes `model`; a function builds it without values, under no distribution."""
    if isinstance(model, keras.layers.Layer):
        return _describe_checked(model, "the model")
    if not callable(model):
        raise PolicyError(
            f"A plan is for a built Keras model or a function that builds one, got {model!r}.",
            got=repr(model),
        )
    name = f"{getattr(model, '__name__', repr(model))}()"
    refusing = partial(_refusing_distributions, name)
    building = refusing if sessions is None else partial(ignoring_distributions, value=True)
    try:
        # The meta device has shapes, and no values.
        return _facts_of_built(model, name, building(), keras.device("meta"))
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
    # The function reads numbers, such as those of `keras.ops.linspace`. Only variables lack values.
    return _facts_of_built(model, name, building(), keras_private.variables_without_memory(name))


def plan_of(facts: LayerFacts, mesh: MeshLike, policy: str, planned: PlannedRules) -> Plan:
    """Makes the layout map over `mesh` of the rules that a policy has planned."""
    outputs = [layer.output_path for layer in facts.layers() if layer.output_path]
    return Plan(_device_mesh(mesh), policy, facts.all_variables(), outputs, planned)


def join_job() -> None:
    """Joins the job; all ranks then draw initial values from one seed."""
    keras.distribution.initialize()


def joined_mesh(mesh: Mesh) -> Any:
    """Makes the Keras mesh over all devices of the job, which this process joins."""
    return keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names)


def _device_mesh(mesh: MeshLike) -> Any:
    """Converts to a Keras mesh; a `Mesh`, without devices, gets placeholder names of them."""
    if isinstance(mesh, Mesh):
        devices = [f"device:{rank}" for rank in range(mesh.size)]
        return keras.distribution.DeviceMesh(mesh.shape, mesh.axis_names, devices)
    if isinstance(mesh, keras.distribution.DeviceMesh):
        return mesh
    raise PolicyError(
        f"A plan is for a keras.distribution.DeviceMesh, or, where the devices are not at hand, a "
        f"shardcore.domain.layouts.mesh.Mesh((2, 4), ('data', 'model')); got {mesh!r}.",
        got=repr(mesh),
    )


class _Refusing:
    """The place of a backend's library of distributions: each use is an error."""

    def __init__(self, error: PolicyError) -> None:
        self._error = error

    @replaces_value(
        "keras.src.distribution.distribution_lib:distribution_lib",
        reason="A function that builds a model for a plan may set no distribution.",
    )
    def instead_of_none(self, original: object) -> object:
        """Replaces the library that Keras lacks on torch; one that is installed stays."""
        return original or self

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error


@contextmanager
def _refusing_distributions(name: str) -> Iterator[None]:
    """Opens a context in which the function `name` may set no distribution.

    Keras to 3.15 has no library for distributions on torch: it fails where one is made.
    """
    error = PolicyError(
        f"{name} sets a distribution, which a plan can only pass over where shardcore is "
        "installed: call shardcore.install() first."
    )
    with keras_private.replaced(_Refusing(error).instead_of_none):
        yield
    if keras.distribution.distribution() is not None:
        raise error


def _facts_of_built(
    build: Callable[[], object],
    name: str,
    building: AbstractContextManager[None],
    values: AbstractContextManager[None],
) -> LayerFacts:
    with (
        keras_private.without_distribution(),
        keras_private.restored_counts_and_seeds(),
        keras_private.repeating_shapes(),
        values,
    ):
        with building:
            built = build()
        return _describe_checked(built, f"what {name} returned")


def _describe_checked(model: object, what: str) -> LayerFacts:
    if not isinstance(model, keras.layers.Layer):
        raise PolicyError(f"{what} is {type(model).__name__}, expected a Keras model.")
    if not model.built or not model.variables:
        raise PolicyError(
            f"{what}, {model.name!r}, is not built, so it has no variables yet: give it an Input, "
            "or call it on a batch.",
            name=model.name,
        )
    return describe(model)
