"""Every public class of `keras.metrics`: with row weights and masks."""

from collections.abc import Callable
from typing import Any

import keras

from tests.matrix.cases.classifier import (
    BINARY,
    CLASSES,
    FEATURES,
    LABELS,
    ONE_HOT,
    REAL,
    WAYS,
    Make,
    Rng,
    Target,
    adam,
    binary,
    classifier,
    in_ways,
    of_both,
    reals,
    weights,
)
from tests.matrix.parity import Case

M = keras.metrics


# Their weights are of each element, not of each row.
UNWEIGHTED = ["BinaryIoU", "PearsonCorrelation/axis"]


def _spread(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.max(y_pred, axis=-1) - keras.ops.min(y_true, axis=-1)


class Largest(M.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), initializer="zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(
            keras.ops.maximum(self.largest, keras.ops.max(keras.ops.stop_gradient(y_pred) - y_true))
        )

    def result(self):
        return self.largest


METRIC_TARGETS: dict[str, tuple[Callable[..., Any], Target]] = of_both(M) | {
    "AUC": (lambda **k: M.AUC(20, **k), BINARY),
    "AUC/PR": (lambda **k: M.AUC(20, "PR", **k), BINARY),
    "AUC/labels": (lambda **k: M.AUC(20, multi_label=True, num_labels=CLASSES, **k), BINARY),
    "AUC/weights": (lambda **k: M.AUC(20, multi_label=True, num_labels=CLASSES,
                                      label_weights=[1.0, 2.0, 3.0, 4.0], **k), BINARY),
    "Accuracy": (M.Accuracy, ("sigmoid", binary)),
    "BinaryAccuracy": (M.BinaryAccuracy, BINARY),
    "BinaryCrossentropy": (M.BinaryCrossentropy, BINARY),
    "BinaryIoU": (lambda **k: M.BinaryIoU(threshold=0.4, **k), BINARY),
    "CategoricalAccuracy": (M.CategoricalAccuracy, ONE_HOT),
    "ConcordanceCorrelation": (M.ConcordanceCorrelation, REAL),
    "F1Score": (M.F1Score, ONE_HOT),
    "F1Score/micro": (lambda **k: M.F1Score("micro", 0.3, **k), BINARY),
    "F1Score/by support": (lambda **k: M.F1Score("weighted", **k), ONE_HOT),
    "FBetaScore": (lambda **k: M.FBetaScore("macro", 2.0, **k), ONE_HOT),
    "FalseNegatives": (M.FalseNegatives, BINARY),
    "FalsePositives": (lambda **k: M.FalsePositives([0.3, 0.6], **k), BINARY),
    "IoU": (lambda **k: M.IoU(CLASSES, [0, 2], sparse_y_pred=False, **k), LABELS),
    "LogCoshError": (M.LogCoshError, REAL),
    "MeanIoU": (lambda **k: M.MeanIoU(CLASSES, sparse_y_pred=False, **k), LABELS),
    "MeanIoU/ignored": (lambda **k: M.MeanIoU(CLASSES, ignore_class=1, sparse_y_pred=False, **k),
                        LABELS),
    "MeanMetricWrapper": (lambda **k: M.MeanMetricWrapper(_spread, **k), REAL),
    "Metric/subclass": (Largest, REAL),
    "OneHotIoU": (lambda **k: M.OneHotIoU(CLASSES, [0, 2], **k), ONE_HOT),
    "OneHotMeanIoU": (lambda **k: M.OneHotMeanIoU(CLASSES, **k), ONE_HOT),
    "PearsonCorrelation": (M.PearsonCorrelation, REAL),
    "PearsonCorrelation/axis": (lambda **k: M.PearsonCorrelation(axis=0, **k), REAL),
    "Precision": (M.Precision, BINARY),
    "Precision/top": (lambda **k: M.Precision(top_k=2, **k), ONE_HOT),
    "Precision/class": (lambda **k: M.Precision([0.3, 0.6], class_id=1, **k), BINARY),
    "PrecisionAtRecall": (lambda **k: M.PrecisionAtRecall(0.5, 20, **k), BINARY),
    "R2Score": (M.R2Score, REAL),
    "R2Score/variance": (lambda **k: M.R2Score("variance_weighted_average", **k), REAL),
    "Recall": (M.Recall, BINARY),
    "Recall/top": (lambda **k: M.Recall(top_k=2, **k), ONE_HOT),
    "RecallAtPrecision": (lambda **k: M.RecallAtPrecision(0.5, 20, **k), BINARY),
    "RootMeanSquaredError": (M.RootMeanSquaredError, REAL),
    "SensitivityAtSpecificity": (lambda **k: M.SensitivityAtSpecificity(0.5, 20, **k), BINARY),
    "SparseCategoricalAccuracy": (M.SparseCategoricalAccuracy, LABELS),
    "SparseTopKCategoricalAccuracy": (lambda **k: M.SparseTopKCategoricalAccuracy(2, **k), LABELS),
    "SpecificityAtSensitivity": (lambda **k: M.SpecificityAtSensitivity(0.5, 20, **k), BINARY),
    "TopKCategoricalAccuracy": (lambda **k: M.TopKCategoricalAccuracy(2, **k), ONE_HOT),
    "TrueNegatives": (M.TrueNegatives, BINARY),
    "TruePositives": (M.TruePositives, BINARY),
}  # fmt: skip
# They take a row of values for each sample, or reduce the batch: no mask per step.
UNMASKED = [
    "AUC/labels", "AUC/weights", "F1Score", "F1Score/micro", "F1Score/by support", "FBetaScore",
    "PearsonCorrelation/axis", "R2Score", "R2Score/variance",
]  # fmt: skip


class Tracked(keras.Model):
    """Keeps a metric of its predictions alone."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.tracked.update_state(y_pred, None if sample_weight is None else sample_weight[:, None])
        return self.get_metrics_result()


def _metrics() -> list[Case]:
    def with_metric(make: Callable[..., Any], target: Target) -> Callable[[str], dict[str, Any]]:
        loss = "sparse_categorical_crossentropy" if target is LABELS else "mse"
        return lambda way: {
            "loss": loss,
            "weighted_metrics" if "weighted" in way else "metrics": [make(name="m")],
        }

    found = []
    for name, (make, target) in METRIC_TARGETS.items():
        without = [*["weighted"] * (name in UNWEIGHTED), *["masked"] * (name in UNMASKED)]
        ways = [way for way in WAYS if not any(word in way for word in without)]
        found += in_ways(name, with_metric(make, target), target, ways)
    for name, make in {"Mean": M.Mean, "Sum": M.Sum}.items():
        found += [_tracked(name, make, False), _tracked(f"{name}/weighted", make, True)]
    return found


def _tracked(name: str, make: Make, weighted: bool) -> Case:
    def build() -> Any:
        base = classifier("sigmoid")
        model = Tracked(base.inputs[0], base.outputs[0])
        model.tracked = make(name="m")
        model.compile(adam(), "mse")
        return model

    def batch(rng: Rng, rows: int) -> tuple[Any, ...]:
        found = (reals(rng, rows, FEATURES), binary(rng, rows))
        return (*found, weights(rng, rows)) if weighted else found

    return Case(name, build, batch)


METRICS = _metrics()
