"""The layout map of a policy."""

from collections.abc import Collection, Iterable
from typing import Any

import keras

from shardcore.domain.errors import RuleError
from shardcore.domain.layouts.mesh import Mesh
from shardcore.domain.layouts.path_rules import PathRules
from shardcore.domain.layouts.spec import DimSpec, dim_spec
from shardcore.policies.rules import PlannedRules
from shardcore.ports.policy import VariableFacts
from shardcore.ports.types import LayoutLike
from shardcore.reporting.cost.plan import PlanReport, plan_report
from shardcore.reporting.cost.ranking import Ranking

EDITED = "edited"


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
        """Sets the distribution that uses the plan."""
        distribution = keras.distribution.ModelParallel(
            layout_map=self, batch_dim_name=self.batch_dim_name
        )
        keras.distribution.set_distribution(distribution)

    def report(self) -> PlanReport:
        """Returns the report on its current rules and the variables for which it was made.

        Raises:
            LayoutError: If a rule does not fit a variable.
        """
        reasons = {key: self._reason(key) for key in self}
        return plan_report(
            self.policy, self.mesh, self._variables, self._outputs, self._rules(), reasons
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as plain data, fit for JSON."""
        return self.report().to_dict()

    def to_python(self) -> str:
        """Returns a program that sets the distribution of the plan without this class."""
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
        return rule.reason if same and rule is not None else EDITED

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        return f"<Plan by policy {self.policy!r} over mesh {self.mesh}: {len(self)} rules>"

    def __rich__(self) -> Any:
        return self.report().table()


def _first_three(paths: Iterable[str]) -> str:
    listed = list(paths)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
