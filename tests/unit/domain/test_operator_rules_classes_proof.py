"""Each rule of a loss over split classes, over all ranks: the parts give the whole."""

import inspect

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcore.domain import operator_rules_classes as classes
from tests.unit.domain.rule_proof import Call, as_indices, prove, sizes

NAMES = 50


@st.composite
def calls(draw):
    """The shapes of input and target, that of the classes, and whether losses are summed."""
    samples, count, *rest = draw(st.lists(sizes, min_size=2, max_size=4))
    weighted = draw(st.booleans())
    shapes = [(samples, count, *rest), (samples, *rest)], [(count,)] * (1 + weighted)
    return shapes, weighted, draw(st.booleans())


def picked(target, numbers, weights):
    """Of each sample and class, whether it is of that class, times the weight of that class.

    A number may be there twice or not at all, which a sum over the classes does not mind.
    """
    is_of = as_indices(target, NAMES)[..., None] == as_indices(numbers, NAMES)
    return np.moveaxis(is_of * (weights[0] if weights else 1.0), -1, 1)


@st.composite
def nll_losses(draw):
    (tensors, of_classes), weighted, summed = draw(calls())

    def run(parts):
        x, target, numbers, *weights = parts
        of_class = picked(target, numbers, weights)
        loss = -(x * of_class).sum(1)
        counts = of_class.sum() if weighted else np.asarray(float(target.size))
        return [loss.sum() if summed else loss, counts]

    rule = classes.nll_loss_of_classes(len(tensors[0]), weighted, summed)
    return Call(rule, [*tensors, *of_classes], run)


@st.composite
def nll_losses_backward(draw):
    (tensors, of_classes), weighted, summed = draw(calls())

    def run(parts):
        gradient, x, target, total, numbers, *weights = parts
        each = gradient / total * np.ones(target.shape)
        return [-picked(target, numbers, weights) * np.expand_dims(each, 1) * np.ones(x.shape)]

    rule = classes.nll_loss_of_classes_backward(len(tensors[0]), weighted, summed)
    gradient = () if summed else tensors[1]
    return Call(rule, [gradient, *tensors, (), *of_classes], run)


# The calls of each rule.
CALLS = {
    "nll_loss_of_classes": nll_losses(),
    "nll_loss_of_classes_backward": nll_losses_backward(),
}


def test_every_rule_is_proved():
    rules = inspect.getmembers(classes, lambda each: hasattr(each, "cache_info"))
    assert set(CALLS) == {name for name, _ in rules} - {"letter"}


@pytest.mark.parametrize(("name", "factor"), [(n, f) for n in CALLS for f in "abcd"])
# A factor is in few of a rule's calls, and others are passed over.
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_the_parts_give_the_whole(name, factor, data):
    prove(data.draw(CALLS[name]), factor, data)
