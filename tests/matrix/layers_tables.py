"""The tables of the matrix: whose public classes, their cases, and what is known of them."""

import functools
import inspect
import os
from collections.abc import Iterable
from types import ModuleType

import keras
from attrs import frozen

from tests.matrix.layer_cases import LAYERS, NOT_ON_ONE_DEVICE
from tests.matrix.losses_cases import LOSSES
from tests.matrix.metrics_cases import METRICS
from tests.matrix.models_cases import MODELS
from tests.matrix.optimizers_cases import OPTIMIZERS, SCHEDULES
from tests.matrix.parity import MESHES, Case, Mesh, Outcome, Reference, one_device, over_mesh
from tests.matrix.weights_cases import CONSTRAINTS, INITIALIZERS, REGULARIZERS

# All cases on all meshes if "full", else a few cases on the mesh that splits most.
FULL = os.environ.get("SHARDCORE_MATRIX") == "full"
FAST_MESH = Mesh((2, 2), "last")


@frozen
class Table:
    """Cases of the public classes of one module.

    Args:
        cases: each named after its class.
        module: None for models, which no module lists.
        helpers: classes that compute nothing, with what they are.
        fast: the names of the cases that always run.
    """

    cases: list[Case]
    module: ModuleType | None
    fast: tuple[str, ...]
    helpers: frozenset[str] = frozenset()


TABLES = {
    "layers": Table(
        LAYERS,
        keras.layers,
        ("Dense", "Dense/lora", "Dense/regularized", "EinsumDense", "Embedding/masked",
         "Layer/state", "Layer/add_loss", "Softmax/axes", "Conv2D", "Conv1D/causal",
         "DepthwiseConv2D", "Conv2DTranspose",
         "MaxPooling2D", "AveragePooling2D/same", "GlobalAveragePooling1D/masked",
         "BatchNormalization/odd", "BatchNormalization/masked", "LayerNormalization",
         "RMSNormalization", "GroupNormalization", "Dropout/global seed", "Concatenate/axis",
         "Reshape/split", "ZeroPadding2D", "MultiHeadAttention/causal", "GroupQueryAttention",
         "Attention/padded", "GRU/masked", "LSTM", "SimpleRNN/stateful", "RandomFlip", "Resizing"),
        helpers=frozenset({"InputSpec"}),
    ),
    "models": Table(MODELS, None, ("decoder", "autoencoder", "own loss")),
    "losses": Table(
        LOSSES,
        keras.losses,
        ("CategoricalCrossentropy", "CTC", "Dice", "MeanSquaredError/mean masked",
         "MeanSquaredError/weighted", "SparseCategoricalCrossentropy/logits"),
    ),
    "metrics": Table(
        METRICS,
        keras.metrics,
        ("AUC/weighted", "F1Score", "MeanIoU", "Precision/top", "R2Score",
         "SparseTopKCategoricalAccuracy", "SparseCategoricalAccuracy"),
    ),
    "optimizers": Table(
        OPTIMIZERS,
        keras.optimizers,
        ("Adafactor", "Adam/all", "Lamb", "Muon", "SGD/global_clipnorm", "MultiOptimizer",
         "LossScaleOptimizer/overflowing"),
        helpers=frozenset({"OptimizerMap"}),
    ),
    "schedules": Table(SCHEDULES, keras.optimizers.schedules, ("CosineDecay",)),
    "regularizers": Table(REGULARIZERS, keras.regularizers, ("L2", "OrthogonalRegularizer/rows")),
    "constraints": Table(CONSTRAINTS, keras.constraints, ("UnitNorm",)),
    "initializers": Table(INITIALIZERS, keras.initializers, ("GlorotUniform", "Orthogonal")),
}  # fmt: skip

# What does not run over a mesh, and what the user is told. Every other error fails the suite.
DOCUMENTED_ERRORS = {
    "TorchModuleWrapper": "Write the module as a Keras layer: it keeps its own parameters.",
}


def public_classes(table: Table) -> list[set[str]]:
    """The names of each public class of the module: some have several."""
    names: dict[type, set[str]] = {}
    for name, value in inspect.getmembers(table.module, inspect.isclass):
        names.setdefault(value, set()).add(name)
    return [each for each in names.values() if not each & table.helpers]


def class_of(case: Case) -> str:
    """The class that the case is of."""
    return case.name.partition("/")[0]


def meshes() -> list[Mesh]:
    """The meshes of this run."""
    return MESHES if FULL else [FAST_MESH]


def selected(table: Table) -> list[Case]:
    """The cases of this run."""
    always = {*table.fast, *DOCUMENTED_ERRORS}
    return [case for case in table.cases if FULL or case.name in always]


def unexpected(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """What must not be: a wrong number, or an error that is not documented."""
    return {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome.status == "WRONG"
        or (outcome.status == "error" and name not in DOCUMENTED_ERRORS)
    }


@functools.cache
def reference(name: str) -> Reference:
    """The numbers of one device, of the cases of this run."""
    return one_device(selected(TABLES[name]))


@functools.cache
def outcomes(name: str, mesh: Mesh) -> dict[str, Outcome]:
    """What came of the cases of this run."""
    return over_mesh(selected(TABLES[name]), mesh, reference(name))


def not_on_one_device(cases: Iterable[Case]) -> dict[str, str]:
    """Those of the cases that plain Keras cannot run either, and why."""
    return {c.name: NOT_ON_ONE_DEVICE[c.name] for c in cases if c.name in NOT_ON_ONE_DEVICE}
