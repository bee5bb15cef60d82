"""The functions of `shardcore` that plan a model, and show what a plan takes and did.

The examples have the model of `shardcore.api`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcore import bootstrap
from shardcore.bootstrap import environment, planning
from shardcore.bootstrap.cost import auto
from shardcore.bootstrap.cost.traces import reinstall
from shardcore.bootstrap.ranks import launching
from shardcore.domain.errors import LayoutError, PolicyError
from shardcore.domain.layouts.path_rules import RulesReport
from shardcore.ports.types import KerasModel, MeshLike
from shardcore.reporting.cost.plan import MemoryReport
from shardcore.reporting.logs import log_of

if TYPE_CHECKING:
    from shardcore.binding.cost.plan import Plan

logger = log_of("plan")


def plan(
    model: KerasModel | Callable[[], KerasModel],
    mesh: MeshLike | None = None,
    policy: str = "tensor_parallel",
    *,
    devices: int | None = None,
    **options: object,
) -> "Plan":
    """Plans a layout map for the model, by a policy: print it, edit it, use it.

    Build the model after that, under a distribution that uses the plan.

    Args:
        model: A function without arguments that builds the model. It runs on the meta device,
            which stores no values, and does not change the names and initial values of models
            that are built later. A distribution that it sets is passed over. Or a built model;
            the variables of the model that you build later need the same paths, so name its
            layers.
        mesh: The `keras.distribution.DeviceMesh`; or a `shardcore.domain.layouts.mesh.Mesh`, to see
            a plan on a machine without these devices.
        policy: "data_parallel", "fully_sharded", "hybrid_sharded", "tensor_parallel",
            "sequence_parallel", "context_parallel", "expert_parallel", "per_layer", or the name of
            a plug-in's.
            "auto" chooses mesh and policy by the predicted time of a train step.
        devices: The number of devices, in place of the mesh; "auto" alone takes it. In a job of so
            many ranks all call it together: rank 0 searches, and the call joins the job.
        **options: Options of the policy: `axis`, the mesh axis to shard over; `small`, the bytes
            below which a variable is replicated. "data_parallel" takes `axis` only,
            "hybrid_sharded" takes `shard`, the axis of shards, in place of `axis`.
            "sequence_parallel" and "context_parallel" also take `batch`, the axis of the batch;
            "context_parallel" and "expert_parallel" take `shard`, the axis over which variables
            are sharded; "context_parallel" takes `tensor` in its place, the axis over which pairs
            and heads are sharded.
            "per_layer" takes `layers`, a policy by the path of a layer, and `otherwise`, that of
            the others.
            "auto" takes others: `batch`, a batch or a function that returns one; `rows`, the rows
            of the global batch, by default those of `batch`; `machine`, a `Machine`, its name or
            its file, by default the one at hand if its GPUs are well known, else "h100";
            `memory`, the bytes of a device as a number or as text such as "80GB", and `host`, the
            devices of a host, by default those of the machine.

    Returns:
        The `Plan`, a `keras.distribution.LayoutMap`. `print(plan)` shows its rules, what they
        save and why; `plan[key] = spec` and `del plan[key]` edit it; `plan.to_python()` is a
        program that sets the same distribution. `plan.ranking` has the predictions of "auto".

    Raises:
        PolicyError: If there is no such policy or option, or it cannot plan this model.
        MachineError: If there is no such machine.
        EnvironmentProblem: If Keras runs on another backend.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> plan = shardcore.plan(model, Mesh((4,), ("data",)), policy="fully_sharded", small=0)
        >>> plan["net/hidden/kernel"].axes
        ('data', None)
    """
    environment.choose_backend()
    if policy == auto.NAME:
        chosen: Plan = auto.plan(model, mesh, devices, options)
        return chosen
    if mesh is None or devices is not None:
        raise PolicyError(
            f"Policy {policy!r} takes a mesh, and policy 'auto' takes devices=: got mesh={mesh!r}, "
            f"devices={devices!r}. Give mesh= alone, or policy='auto' with devices= alone.",
            name=policy,
        )
    from shardcore.binding.cost.plan import make_plan

    return make_plan(
        model,
        mesh,
        policy,
        lambda facts, shape: planning.plan(policy, facts, shape, options),
        bootstrap.installation().binding.sessions if bootstrap.is_installed() else None,
    )


def build(
    model: Callable[[], KerasModel],
    policy: str = auto.NAME,
    *,
    mesh: MeshLike | None = None,
    **options: object,
) -> KerasModel:
    """Plans a model for the devices of the job, and builds it so. All ranks call it.

    It installs shardcore if need be, sets the distribution of the plan, calls `model`, verifies
    what that has built, and logs one line: policy, mesh, memory of a rank, predicted step.

    Args:
        model: The function that builds and compiles the model: `lambda: Llama3CausalLM
            .from_preset(...)` also reads its weights, each rank its shards. It runs once without
            values for the plan.
        policy: As for `plan`. "auto" chooses the mesh too; rank 0 searches for all.
        mesh: The mesh, for another policy than "auto".
        **options: Options of the policy: "auto" needs `batch`.

    Returns:
        The model, under a distribution that stays set.

    Raises:
        PolicyError: As of `plan`.
        RuleError: If `model` has built other variables than those that were planned.
        LayoutError: If a variable is not stored as the plan says.

    Example:
        >>> def build_net():
        ...     net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        ...     net.compile("sgd", "mse")
        ...     return net
        >>> mesh = keras.distribution.DeviceMesh((1,), ("data",))
        >>> shardcore.build(build_net, "fully_sharded", mesh=mesh).built
        True
    """
    if hasattr(model, "variables") or not callable(model):
        raise PolicyError(
            "The model is built under its plan: give the function that builds and compiles it, "
            f"got {model!r}.",
            got=repr(model),
        )
    bootstrap.install("auto", {})
    installation = bootstrap.installation()
    devices = installation.processes.launched if policy == auto.NAME else None
    chosen = plan(model, mesh, policy, devices=devices, **options)
    from shardcore.binding.cost.rules_report import check_plan
    from shardcore.binding.inspection.verify import verify_model

    chosen.distribute()
    built = model()
    check_plan(built, installation.binding.sessions.required())
    verification = verify_model(built, None, installation.binding.sessions)
    if not verification.ok:
        raise LayoutError(f"A variable is not stored as planned.\n{verification}")
    logger.info("The model is built: %s.", chosen.summary())
    return built


def estimate_memory(plan: "Plan", model: Callable[[], KerasModel], batch: object) -> MemoryReport:
    """Estimates the memory that a rank takes in a train step, before you have devices.

    Another process runs one step as the first of simulated ranks, on tensors that have shapes
    and no values: it needs no room for the model. The step is an eager one, as the first steps of
    `fit` are. Where outputs are so large that `fit` runs a program from the first step on, it is
    that program.

    Args:
        plan: What `plan` has returned.
        model: The function that builds and compiles the model.
        batch: The global batch, `(x, y)` or `(x, y, sample_weight)`, or a function that returns it;
            `x` alone for a model that has no targets.

    Returns:
        The report: print it for a table, `.to_dict()` for data, `.step_peak` for the sum.

    Raises:
        PolicyError: If this process has joined a job of several ranks, or the model or its step
            fails without values.

    Example:
        >>> from shardcore.domain.layouts.mesh import Mesh
        >>> def build():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        ...     model.compile("sgd", "mse")
        ...     return model
        >>> plan = shardcore.plan(build, Mesh((4,), ("data",)), policy="fully_sharded")
        >>> shardcore.estimate_memory(plan, build, (x, y)).step["batch"]
        192
    """
    from shardcore.adapters.ranks.job import process_group

    if not hasattr(plan, "distribute"):
        raise PolicyError(f"Expected a plan of shardcore.plan(), got {plan!r}.", got=repr(plan))
    if hasattr(model, "variables") or not callable(model):
        raise PolicyError(
            "The model is built without values, under the plan: give the function that builds and "
            f"compiles it, got {model!r}.",
            got=repr(model),
        )
    if process_group.has_others():
        raise PolicyError(
            "The step runs in a process that this one starts, which has joined a job: "
            "estimate before the first DeviceMesh, DataParallel or list_devices(), with a plan "
            "over a shardcore.domain.layouts.mesh.Mesh."
        )
    # The rules of a plan name layers as the next model of this process will.
    return launching.run_separately("estimate_memory()", _measure_memory, plan, model, batch)


def _measure_memory(plan: "Plan", build: Callable[[], KerasModel], batch: object) -> MemoryReport:
    """Runs a step in this process, which becomes the first rank of simulated ones (ADR 39)."""
    from shardcore.adapters.ranks.job import process_group

    reinstall({})
    if not process_group.is_started():
        bootstrap.simulate(plan.mesh.size)
    plan.distribute()
    from shardcore.adapters.cost.memory import StepMemory
    from shardcore.binding.inspection.memory_estimate import estimate_memory as estimate

    binding = bootstrap.installation().binding
    given = batch if callable(batch) else lambda: batch
    return estimate(build, given, plan.policy, binding.sessions, StepMemory(), binding.capture)


def rules_report(model: KerasModel) -> RulesReport | None:
    """Lists which rule of the layout map each variable got, and the rules that match nothing.

    Args:
        model: The model, built under the distribution that is set.

    Returns:
        The report, or None if the distribution has no layout map.

    Raises:
        EnvironmentProblem: If shardcore is not installed.
        CallProblem: If no distribution is set.

    Example:
        >>> shardcore.rules_report(model).unused_rules
        ()
    """
    from shardcore.binding.cost import rules_report

    return rules_report.rules_report(model, bootstrap.installation().binding.sessions.required())
