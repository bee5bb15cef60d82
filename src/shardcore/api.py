"""The functions of `shardcore`: each finds what is installed and hands on."""

from typing import TYPE_CHECKING, Any

from shardcore import bootstrap
from shardcore.bootstrap import environment, planning
from shardcore.domain.paths.report import RulesReport
from shardcore.domain.placements import ReduceOp
from shardcore.reporting.explanation import Explanation
from shardcore.reporting.status import Status
from shardcore.reporting.verification import Verification

if TYPE_CHECKING:
    from shardcore.binding.functions import Functions


def install(strategy: str = "auto", **options: Any) -> Status:
    """Give Keras on PyTorch the `keras.distribution` API.

    With no distribution set, Keras computes as before. Call it before the model is built; before
    or after Keras is imported. Calling it again with the same strategy, or "auto", changes
    nothing; another strategy needs `uninstall()` first.

    Args:
        strategy: How distributed variables live: "dtensor", "manual", "single", the name of one
            that another package offers, or "auto" for the best that can be had here.
        options: Those of the strategy. "dtensor" and "manual" have `weights` ("compute"
            or "gather"), `gathered` ("per_use" or "per_step") and `links` (a `shardcore.Link` by
            mesh axis).

    Returns:
        The same as `status()`.

    Raises:
        EnvironmentProblem: If Keras runs on another backend, or Keras or torch is missing or of
            an unknown version.
        StrategyError: If there is no such strategy, it cannot be used here, or another is
            installed; if it has no such option.

    Example:
        >>> import shardcore
        >>> shardcore.install(strategy="auto").strategy
        'dtensor'
        >>> shardcore.uninstall()
    """
    bootstrap.install(strategy, options)
    return bootstrap.status()


def uninstall() -> None:
    """Give every Keras name its own value back, and unset the distribution.

    A process group that was joined stays joined, and variables that were laid out stay so: build
    the model again.
    """
    bootstrap.uninstall()


def status() -> Status:
    """Which strategy is in use and why not the others, the mesh, the devices, the versions.

    It does not join the job: before `keras.distribution.initialize()`, which `list_devices()` and
    every distribution call, this process is one of one.
    """
    return bootstrap.status()


def verify(model: Any, batch: Any = None) -> Verification:
    """The report to run before believing it: is every variable stored as its layout says?

    All ranks call it together. Per variable: path, rule, spec, shapes, bytes here and in all,
    whether what this rank stores is its shard of the whole value (compared on every rank), and
    whether the last gradient arrived in the variable's layout.

    Args:
        model: A built Keras model.
        batch: `(x, y)` or `(x, y, sample_weight)`, the global batch: its gradients are computed
            first, and no variable is changed. Without it the gradients of the last step count.

    Returns:
        The report: print it for a table, `.to_dict()` for data, `.ok` for the verdict.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        StrategyError: If no distribution is set.
    """
    from shardcore.binding.verification import verify_model

    return verify_model(model, batch, _sessions())


def explain(model: Any, batch: Any, step: str = "train") -> Explanation:
    """What one step of the model moves between ranks: every collective, where, and why.

    All ranks call it together, on the main thread. One step is run on the batch, eagerly; then
    variables, gradients, optimizer state, metrics and generators are put back as they were. What
    Python code of yours does in a step it does here too. What is not built yet is built.

    Args:
        model: A Keras model; compiled, unless the step is "predict".
        batch: The global batch: `(x, y)` or `(x, y, sample_weight)`; for "predict" `x`.
        step: "train", "test" or "predict".

    Returns:
        The explanation: print it for a table, `.to_dict()` for data, `.collectives` and
        `.avoidable`, and `.save("step.html")` or `.save("step.svg")` for a picture.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        StrategyError: If the model is not compiled, the batch or the step is none, or this is not
            the main thread.
    """
    from shardcore.adapters.traffic import StepWitness
    from shardcore.binding.explaining import explain_model

    return explain_model(model, batch, step, _sessions(), StepWitness)


def plan(model: Any, mesh: Any, policy: str = "tensor_parallel", **options: Any) -> Any:
    """A layout map for the model, made by a policy: print it, edit it, keep it.

    The model is built again afterwards, under the distribution that uses the plan: Keras lays
    variables out as it creates them.

    Args:
        model: A function without arguments that builds the model: it is called on the meta
            device, which holds no values, and leaves no trace, so that the model that it builds
            later has the same names and initial values as without a plan. Or a built model; then
            the model that is built later needs the same variable paths, so name its layers.
        mesh: The `keras.distribution.DeviceMesh`; or a `shardcore.domain.mesh.Mesh`, to look at
            a plan where the devices are not.
        policy: Which layout each variable gets: "data_parallel", "fully_sharded",
            "tensor_parallel", "sequence_parallel", or the name of one that another package offers.
        **options: What the policy takes: `axis`, the mesh axis that it splits over, and `small`,
            the bytes below which it splits nothing; none for "data_parallel" but `axis`.
            "sequence_parallel" takes `batch` too, the axis of the batch.

    Returns:
        The `Plan`, a `keras.distribution.LayoutMap`. `print(plan)` shows its rules, what they
        save and why; `plan[key] = spec` and `del plan[key]` edit it; `plan.to_python()` is the
        program that makes it.

    Raises:
        PolicyError: If there is no such policy or option, or it cannot plan this model.
        EnvironmentProblem: If Keras runs on another backend.

    Example:
        >>> import shardcore
        >>> def distribution(build, mesh):
        ...     plan = shardcore.plan(build, mesh, policy="fully_sharded")
        ...     return keras.distribution.ModelParallel(layout_map=plan, batch_dim_name="data")
    """
    environment.choose_backend()
    from shardcore.binding.planning import make_plan

    return make_plan(
        model, mesh, policy, lambda facts, shape: planning.plan(policy, facts, shape, options)
    )


def rules_report(model: Any) -> RulesReport | None:
    """Which rule of the layout map each variable got, and the rules that got none.

    Returns:
        The report, or None where the distribution has no layout map.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        StrategyError: If no distribution is set.
    """
    from shardcore.binding import rules

    return rules.rules_report(model, _sessions().required())


def distribute_variable(variable: Any, layout: Any = None) -> Any:
    """Lay a Keras variable out again, for instance one made before the distribution was set.

    All ranks call it together. The value is rank 0's.

    Args:
        variable: The Keras variable. It is changed in place.
        layout: A `TensorLayout` or a tuple of axis names, one entry per dim; by default what
            the distribution says.

    Returns:
        The variable.
    """
    return _functions().distribute_variable(variable, layout)


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """`tensor` in `layout`, differentiable; a plain tensor counts as equal on all ranks.

    Args:
        tensor: A tensor or array.
        layout: A `TensorLayout` or a tuple of axis names, one entry per dim.
    """
    return _functions().distribute_tensor(tensor, layout)


def all_gather_variable(variable: Any) -> Any:
    """The whole value of a Keras variable as a plain tensor, on every rank.

    All ranks call it together.
    """
    return _functions().all_gather_variable(variable)


def all_reduce(tensor: Any, op: ReduceOp = "sum", axis_name: str | None = None) -> Any:
    """`tensor` reduced over the ranks along a mesh axis, on each of them.

    Args:
        tensor: A plain tensor, of one shape on all ranks; this rank's own values.
        op: "sum", "avg", "max", "min" or "product".
        axis_name: The mesh axis, by default all of them.
    """
    return _functions().all_reduce(tensor, op, axis_name)


def all_gather(tensor: Any, axis: int = 0, axis_name: str | None = None) -> Any:
    """The tensors of the ranks along a mesh axis, joined along tensor dim `axis`.

    Args:
        tensor: A plain tensor, of one shape on all ranks; this rank's own values.
        axis: The tensor dim to join along.
        axis_name: The mesh axis, by default all of them.
    """
    return _functions().all_gather(tensor, axis, axis_name)


def ensure_dtensor(tensor: Any, layout: Any = None) -> Any:
    """`tensor` as the strategy's own kind, replicated unless a layout is given.

    On a mesh of one device every tensor is plain and stays so.

    Args:
        tensor: A tensor or array; plain values count as equal on all ranks.
        layout: A `TensorLayout` or a tuple of axis names, one entry per dim.
    """
    return _functions().ensure_dtensor(tensor, layout)


def ensure_dtensor_input(data: Any) -> Any:
    """A batch, any nest of arrays and tensors, split over the batch axis as `fit` does."""
    return _functions().ensure_dtensor_input(data)


def parallelize_torch_module(module: Any, mesh: Any, rules: Any) -> Any:
    """Lay a plain torch module out by rules, in place, as torch's `parallelize_module` does.

    A rule's key is matched with the module's own names ("encoder.0.weight"), read as a layout
    map's keys are; parameters without a rule, and buffers, are replicated. At the edge of every
    submodule plain tensors become replicated ones and pending sums are reduced; a key that
    ends in ".output" gives that edge a layout. A module that is wrapped in a
    `keras.layers.TorchModuleWrapper` afterwards keeps its layouts.

    All ranks call it together, under a distribution. The values are rank 0's.

    Args:
        module: A `torch.nn.Module`.
        mesh: The mesh of the distribution that is set: the Keras `DeviceMesh`, the
            `shardcore.domain.mesh.Mesh` or the torch `DeviceMesh`.
        rules: A `LayoutMap`, a dict or pairs: keys, and a `TensorLayout` or a tuple of axis
            names, one entry per dim.

    Returns:
        The module. An optimizer of `torch.optim` is made after it: the parameters are new.

    Raises:
        RuleError: If a rule matches nothing, or two rules match one parameter.
        LayoutError: If a layout does not fit its parameter or the mesh.
        MeshError: If `mesh` is not that of the distribution.
        StrategyError: If it is no module, is laid out already, or no distribution is set.

    Example:
        >>> import shardcore
        >>> rules = {"0.weight": ("model", None), "2.weight": (None, "model")}
        >>> def parallel(module, device_mesh):  # between set_distribution(...) and the first step
        ...     return shardcore.parallelize_torch_module(module, device_mesh, rules)
    """
    from shardcore.binding import parallelize

    return parallelize.parallelize(module, mesh, rules, _sessions())


def mesh_info() -> dict[str, Any]:
    """The mesh of the distribution that is set: `shape`, `axis_names`, `devices`."""
    return _functions().mesh_info()


def _sessions() -> Any:
    return bootstrap.installation().binding.sessions


def _functions() -> "Functions":
    from shardcore.binding.functions import Functions

    return Functions(_sessions())
