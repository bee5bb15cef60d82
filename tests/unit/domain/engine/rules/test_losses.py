"""Each rule of a loss, over all ranks: the loss of the parts gives the parts of the loss."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcore.domain.engine.rules import lookups
from tests.unit.domain.engine.rules.proof import Call, as_indices, prove, sizes

CLASSES, IGNORED = 5, 0
# Of classes that are sharded, those that a target may name.
NAMES = 50


@st.composite
def calls(draw):
    """The shapes of input, target and, if there is one, weight; whether losses are summed."""
    samples, *rest = draw(st.lists(sizes, min_size=1, max_size=3))
    target = (samples, *rest)
    weights = [(CLASSES,)] * draw(st.booleans())
    return [(samples, CLASSES, *rest), target, *weights], draw(st.booleans())


def picked(target, weights):
    """Each sample's class, one-hot over dim 1, times the weight of that class; none if ignored."""
    classes = as_indices(target, CLASSES)
    weight = (weights[0] if weights else np.ones(CLASSES)) * (np.arange(CLASSES) != IGNORED)
    return np.moveaxis(np.eye(CLASSES)[classes] * weight, -1, 1)


@st.composite
def nll_losses(draw):
    shapes, summed = draw(calls())

    def run(parts):
        x, target, *weights = parts
        of_class = picked(target, weights)
        loss = -(x * of_class).sum(1)
        return [loss.sum() if summed else loss, of_class.sum()]

    rule = lookups.nll_loss(len(shapes[0]), weight=len(shapes) == 3, reduced=summed)
    return Call(rule, shapes, run)


@st.composite
def nll_losses_backward(draw):
    shapes, summed = draw(calls())

    def run(parts):
        gradient, x, target, total, *weights = parts
        each = gradient / total * np.ones(target.shape)
        return [-picked(target, weights) * np.expand_dims(each, 1) * np.ones(x.shape)]

    rule = lookups.nll_loss_backward(len(shapes[0]), weight=len(shapes) == 3, reduced=summed)
    gradient = () if summed else shapes[1]
    return Call(rule, [gradient, *shapes[:2], (), *shapes[2:]], run)


@st.composite
def calls_on_classes(draw):
    """The shapes of input and target, that of the classes, and whether losses are summed."""
    samples, count, *rest = draw(st.lists(sizes, min_size=2, max_size=4))
    weighted = draw(st.booleans())
    shapes = [(samples, count, *rest), (samples, *rest)], [(count,)] * (1 + weighted)
    return shapes, weighted, draw(st.booleans())


def picked_here(target, numbers, weights):
    """Of each sample and class, whether it is of that class, times the weight of that class.

    A number may be there twice or not at all, which a sum over the classes does not mind.
    """
    is_of = as_indices(target, NAMES)[..., None] == as_indices(numbers, NAMES)
    return np.moveaxis(is_of * (weights[0] if weights else 1.0), -1, 1)


@st.composite
def nll_losses_on_classes(draw):
    (tensors, of_classes), weighted, summed = draw(calls_on_classes())

    def run(parts):
        x, target, numbers, *weights = parts
        of_class = picked_here(target, numbers, weights)
        loss = -(x * of_class).sum(1)
        counts = of_class.sum() if weighted else np.asarray(float(target.size))
        return [loss.sum() if summed else loss, counts]

    rule = lookups.nll_loss(len(tensors[0]), weighted, summed, sharded=True)
    return Call(rule, [*tensors, *of_classes], run)


@st.composite
def nll_losses_backward_on_classes(draw):
    (tensors, of_classes), weighted, summed = draw(calls_on_classes())

    def run(parts):
        gradient, x, target, total, numbers, *weights = parts
        each = gradient / total * np.ones(target.shape)
        return [-picked_here(target, numbers, weights) * np.expand_dims(each, 1) * np.ones(x.shape)]

    rule = lookups.nll_loss_backward(len(tensors[0]), weighted, summed, sharded=True)
    gradient = () if summed else tensors[1]
    return Call(rule, [gradient, *tensors, (), *of_classes], run)


# The calls of each rule.
CALLS = {
    "nll_loss": nll_losses(),
    "nll_loss of sharded classes": nll_losses_on_classes(),
    "nll_loss_backward": nll_losses_backward(),
    "nll_loss_backward of sharded classes": nll_losses_backward_on_classes(),
}


def factors(name):
    return "abcd" if "sharded" in name else "acd"


@pytest.mark.parametrize(("name", "factor"), [(n, f) for n in CALLS for f in factors(n)])
# A factor is in few of a rule's calls, and others are passed over.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_the_shards_give_the_full_result(name, factor, data):
    prove(data.draw(CALLS[name]), factor, data)
