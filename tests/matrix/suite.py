"""All tables of the matrix: which cases there are, on which meshes, and what came of them."""

import inspect
from collections.abc import Iterable
from types import ModuleType

import attrs
import keras
from attrs import field, frozen

from tests.matrix import captured, ops_run, placing
from tests.matrix.cases import histories
from tests.matrix.cases.applications import APPLICATIONS
from tests.matrix.cases.drawn_models import DRAWN
from tests.matrix.cases.layers import LAYERS, NOT_ON_ONE_DEVICE
from tests.matrix.cases.losses import LOSSES
from tests.matrix.cases.metrics import METRICS
from tests.matrix.cases.models import MODELS
from tests.matrix.cases.ops import CASES
from tests.matrix.cases.optimizers import OPTIMIZERS, SCHEDULES
from tests.matrix.cases.own_parts import OWN_PARTS
from tests.matrix.cases.own_steps import OWN_STEPS
from tests.matrix.cases.random import RANDOM
from tests.matrix.cases.weights import CONSTRAINTS, INITIALIZERS, REGULARIZERS
from tests.matrix.outcomes import Outcome, class_of
from tests.matrix.parity import Case, Mesh, Numbers, Reference, one_device, over_mesh

BY_BOTH = Mesh((2, 2), "last", ("data", "model"))
ALL = (
    Mesh((2,)),
    Mesh((2, 1), "last"),
    Mesh((1, 2), "last"),
    Mesh((1, 2), "first"),
    Mesh((2, 2), "last"),
    BY_BOTH,
)
# For what is done to weights alone: who has which rows of the batch shows nothing more.
SHARDED = (
    Mesh((1, 2), "last"),
    Mesh((1, 2), "first"),
    Mesh((2, 2), "last"),
    BY_BOTH,
)
# For what sees no kernel: another sharding of them shows nothing more.
FEW = (Mesh((2,)), Mesh((1, 2), "last"), Mesh((2, 2), "last"))
# For captured steps: one device, and a mesh for each way in which collectives come into a step.
ONE_DEVICE = "one device"
CAPTURED_ON = (Mesh((2, 1), "last"), Mesh((1, 2), "last"), Mesh((2, 2), "last"))
# CI runs a few cases of each table on the mesh that shards most; on two ranks what is done to
# weights or rows alone, and draws.
FAST_MESH = "2x2, last dim over model"
OVER_WEIGHTS, OVER_ROWS = "1x2, last dim over model", "2, DataParallel"
ON_TWO_RANKS = {"random": OVER_WEIGHTS, "metrics": OVER_ROWS, "schedules": OVER_ROWS}


@frozen
class Classes:
    """Cases of the public classes of one module: small models that are trained.

    Args:
        cases: each named after its class.
        module: None for models, which no module lists.
        fast: the names of the cases that CI runs.
        newer: classes that some releases of Keras lack; there their cases are left out.
        helpers: classes that compute nothing.
        on: the meshes.
        functions: whether its functions are meant, too.
    """

    _cases: list[Case]
    module: ModuleType | None
    _fast: tuple[str, ...]
    newer: frozenset[str] = frozenset()
    helpers: frozenset[str] = frozenset()
    on: tuple[Mesh, ...] = ALL
    functions: bool = False
    _reference: Reference = field(factory=dict, init=False, repr=False)

    @property
    def cases(self) -> list[Case]:
        """The cases of the classes that this Keras has."""
        return [case for case in self._cases if self._is_there(case.name)]

    @property
    def fast(self) -> tuple[str, ...]:
        """The names of the cases that CI runs."""
        return tuple(filter(self._is_there, self._fast))

    def _is_there(self, case: str) -> bool:
        return class_of(case) not in self.newer or hasattr(self.module, class_of(case))

    def meshes(self) -> list[str]:
        """The names of the meshes."""
        return [mesh.name for mesh in self.on]

    def run(self, mesh: str, only: Iterable[str] | None = None) -> dict[str, Outcome]:
        """The outcomes of the cases on the mesh of that name: of all, or of these names.

        What is listed as not running on one device is left out; what else does not is an error.
        """
        wanted = None if only is None else set(only)
        cases = [case for case in self.cases if case.name not in NOT_ON_ONE_DEVICE]
        chosen = [c for c in cases if wanted is None or c.name in wanted]
        numbers = self.reference(chosen)
        by_name = {each.name: each for each in self.on}
        return _failed(chosen, numbers) | over_mesh(chosen, by_name[mesh], numbers)

    def reference(self, cases: Iterable[Case]) -> Reference:
        """The numbers of one device, computed once for all meshes."""
        missing = [case for case in cases if case.name not in self._reference]
        if missing:
            self._reference.update(one_device(missing))
        return self._reference

    def named(self, names: Iterable[str]) -> set[str]:
        """The cases of these names, and those of the classes of these names."""
        wanted = set(names)
        return {c.name for c in self.cases if {c.name, class_of(c.name)} & wanted}

    def classes(self) -> set[str]:
        """The rows of the table."""
        return {class_of(case.name) for case in self.cases if case.name not in NOT_ON_ONE_DEVICE}

    def public(self) -> list[set[str]]:
        """The names of each public class or function of the module: some have several."""
        names: dict[int, set[str]] = {}
        kind = callable if self.functions else inspect.isclass
        for name, value in inspect.getmembers(self.module, kind):
            if not name.startswith("_"):
                names.setdefault(id(value), set()).add(name)
        return [each for each in names.values() if not each & self.helpers]


@frozen
class Functions:
    """Cases of public functions: one call in all layouts of its operands."""

    cases: dict[str, list[ops_run.Case]]

    def meshes(self) -> list[str]:
        """The names of the meshes."""
        return list(placing.MESHES)

    def named(self, names: Iterable[str]) -> set[str]:
        """The functions of these names."""
        return set(names) & set(self.cases)

    def classes(self) -> set[str]:
        """The rows of the table."""
        return set(self.cases)

    def run(self, mesh: str, only: Iterable[str] | None = None) -> dict[str, Outcome]:
        """The outcomes of the calls on the mesh of that name: of all functions, or of these."""
        chosen = {n: c for n, c in self.cases.items() if only is None or n in only}
        return ops_run.over_mesh(chosen, placing.MESHES[mesh])


@frozen
class Captured:
    """The cases of a table again: their captured steps, beside the same steps run eagerly.

    Args:
        table: the cases.
        steps: what is done with each.
        jit_compile: what captures them: "auto", or True for Inductor.
    """

    table: Classes
    steps: captured.Steps = captured.run
    jit_compile: captured.JitCompile = "auto"

    def meshes(self) -> list[str]:
        """The names of the meshes, and of none."""
        return [ONE_DEVICE, *(mesh.name for mesh in CAPTURED_ON)]

    def named(self, names: Iterable[str]) -> set[str]:
        """The cases of these names, and those of the classes of these names."""
        return self.table.named(names)

    def classes(self) -> set[str]:
        """The entries of the table."""
        return self.table.classes()

    def run(self, mesh: str, only: Iterable[str] | None = None) -> dict[str, Outcome]:
        """The outcomes, on the mesh of that name, of the cases that run on one device."""
        wanted = None if only is None else set(only)
        cases = [case for case in self.table.cases if case.name not in NOT_ON_ONE_DEVICE]
        chosen = [c for c in cases if wanted is None or c.name in wanted]
        numbers = self.table.reference(chosen)
        shapes = {c.name: n.shapes for c in chosen if isinstance(n := numbers.get(c.name), Numbers)}
        run = {case.name: case for case in chosen if case.name in shapes}
        by_name = {each.name: each for each in CAPTURED_ON}
        on = by_name.get(mesh)
        outcomes = captured.beside_eager(run, on, shapes, self.steps, self.jit_compile)
        return _failed(chosen, numbers) | outcomes


def _failed(cases: Iterable[Case], numbers: Reference) -> dict[str, Outcome]:
    found = {case.name: numbers[case.name] for case in cases}
    return {n: Outcome("error", f"one device: {v}") for n, v in found.items() if isinstance(v, str)}


CLASSES = {
    "layers": Classes(
        LAYERS,
        keras.layers,
        ("Dense/regularized", "EinsumDense", "Embedding/masked", "Layer/add_loss", "Conv2D",
         "MaxPooling2D", "GlobalAveragePooling1D/masked",
         "BatchNormalization/odd", "BatchNormalization/masked", "LayerNormalization",
         "Dropout/global seed", "Reshape/split",
         "MultiHeadAttention/causal", "GRU/masked", "SimpleRNN/stateful", "RandomFlip"),
        newer=frozenset(
            {"ContrastLimitedAdaptiveHistogramEqualization", "Mosaic", "TernaryDense"}
        ),
        helpers=frozenset({"InputSpec"}),
    ),
    "models": Classes(MODELS, None, ("autoencoder", "own loss")),
    "own parts": Classes(OWN_PARTS, None, ("queue",), on=FEW),
    "own steps": Classes(OWN_STEPS, None, ("adversaries", "of torch"), on=FEW),
    "drawn models": Classes(DRAWN, None, ("series/0",), on=(*FEW, BY_BOTH)),
    "losses": Classes(
        LOSSES,
        keras.losses,
        ("CategoricalCrossentropy", "CTC", "Dice", "MeanSquaredError/mean masked",
         "MeanSquaredError/weighted", "SparseCategoricalCrossentropy/logits"),
        newer=frozenset({"SparseCategoricalFocalCrossentropy"}),
        on=FEW,
    ),
    "metrics": Classes(
        METRICS,
        keras.metrics,
        ("AUC/weighted", "F1Score", "MeanIoU", "Precision/top", "R2Score",
         "SparseTopKCategoricalAccuracy", "SparseCategoricalAccuracy"),
        on=FEW,
    ),
    "optimizers": Classes(
        OPTIMIZERS,
        keras.optimizers,
        ("Adafactor", "Adam/all", "Lamb", "Muon", "SGD/global_clipnorm", "MultiOptimizer",
         "LossScaleOptimizer/overflowing"),
        newer=frozenset({"MultiOptimizer", "ScheduleFreeAdamW"}),
        helpers=frozenset({"OptimizerMap"}),
        on=SHARDED,
    ),
    "schedules": Classes(SCHEDULES, keras.optimizers.schedules, ("CosineDecay",), on=FEW),
    "regularizers": Classes(
        REGULARIZERS, keras.regularizers, ("L2", "OrthogonalRegularizer/rows"), on=SHARDED
    ),
    "constraints": Classes(CONSTRAINTS, keras.constraints, ("UnitNorm",), on=SHARDED),
    "initializers": Classes(
        INITIALIZERS, keras.initializers, ("GlorotUniform", "Orthogonal"), on=SHARDED
    ),
    "random": Classes(
        RANDOM,
        keras.random,
        ("dropout", "gamma/of tensors", "shuffle", "uniform/global seed"),
        functions=True,
        on=FEW,
    ),
}  # fmt: skip

OPERATORS = Functions(dict(sorted(CASES.items())))
# Initializers are not in a step.
CAPTURED = {f"captured {n}": Captured(t) for n, t in CLASSES.items() if n != "initializers"}
CAPTURED["captured own steps"] = Captured(CLASSES["own steps"], captured.run_own)
CAPTURED["captured histories"] = Captured(CLASSES["drawn models"], histories.run)
# The same with Inductor, which takes minutes for each dozen.
COMPILED = {
    name.replace("captured", "compiled"): attrs.evolve(each, jit_compile=True)
    for name, each in CAPTURED.items()
}
# Dozens of normalizations over few values amplify what is rounded: only bits can be compared.
APPLIED = Classes(APPLICATIONS, None, ("MobileNet",))
CAPTURED["captured applications"] = Captured(APPLIED)
TABLES: dict[str, Classes | Functions | Captured] = {
    **CLASSES,
    "ops": OPERATORS,
    **CAPTURED,
    **COMPILED,
}

# What does not run over a mesh, and the error that says so. Every other error fails the suite.
DOCUMENTED_ERRORS: dict[str, str] = {}


def fast_mesh(table: str) -> str:
    """Returns the mesh on which CI runs a few cases of the table of that name."""
    if CLASSES[table].on == SHARDED:
        return OVER_WEIGHTS
    return ON_TWO_RANKS.get(table, FAST_MESH)


def unexpected(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """The failures: a wrong number, or an error that is not documented."""
    return {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome.status == "WRONG"
        or (outcome.status == "error" and class_of(name) not in DOCUMENTED_ERRORS)
    }
