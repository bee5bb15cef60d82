"""An output that replaces parts of an input is written into the input."""

import pytest
import torch

from shardcore.adapters.capture.passes import run_passes
from shardcore.adapters.capture.passes.memory import with_donated_inputs
from shardcore.adapters.capture.passes.sums import Memories
from shardcore.adapters.capture.recording.recorder import Recorder
from shardcore.adapters.capture.running.generated import function_of
from tests.traces import eagerly, names, recorded

ROWS, LAYERS, LENGTH, WIDTH = 3, 2, 4, 6


def replaced(part, new, place):
    """A part of a cache of tokens, with another token in one place."""
    here = (torch.arange(LENGTH) == place).reshape(-1, 1)
    return torch.where(here, new, part)


def layers(cache, new, place):
    """Each layer reads its part of the cache, and the next one depends on what it has found."""
    parts = []
    for number in range(LAYERS):
        part = replaced(cache[:, number], new, place)
        turned = part.permute(0, 2, 1).unsqueeze(1)  # a view of a view, which becomes one
        new = (turned.sum((1, 3)) + new[:, 0])[:, None].add_(part[:, :1])
        parts.append(part)
    return torch.stack(parts, 1), new


def keys_and_values(cache, new, place):
    """As in keras-hub: the keys and values of a layer are parts of its part."""
    parts = []
    for number in range(LAYERS):
        part = cache[:, number]
        keys, values = replaced(part[:, 0], new, place), replaced(part[:, 1], 2 * new, place)
        new = new + torch.bmm(keys.permute(0, 2, 1), values).sum()
        parts.append(torch.stack([keys, values], dim=1))
    return torch.stack(parts, dim=-4), new


def attention(cache, new, place):
    """One head of torch's own attention."""
    keys, values = (replaced(cache[:, number], new, place) for number in range(LAYERS))
    heads = [each[:, None] for each in (new, keys, values)]
    return torch.stack([keys, values], 1), torch.nn.functional.scaled_dot_product_attention(*heads)


def one(cache, new, place):
    """A cache without layers."""
    updated = replaced(cache, new, place)
    return updated, new + updated.sum()


def tensors(*parts):
    generator = torch.Generator().manual_seed(1)
    shapes = (ROWS, *parts, LENGTH, WIDTH), (ROWS, 1, WIDTH)
    return *(torch.randn(shape, generator=generator) for shape in shapes), torch.tensor(2)


def donated(step, given, count=1):
    """The trace of `step` before and after the pass, and after all passes."""
    trace = recorded(step, *given)
    trace.donated = count
    return trace, with_donated_inputs(trace), run_passes(trace, Memories())


def run(trace, given):
    copies = [each.clone() for each in given]
    function = function_of(trace, {number: trace.first_values[number] for number in trace.outside})
    return function(*copies), copies


@pytest.mark.parametrize(
    ("step", "given"),
    [
        (layers, tensors(LAYERS)),
        (keys_and_values, tensors(LAYERS, 2)),
        (attention, tensors(LAYERS)),
        (one, tensors()),
    ],
)
def test_a_cache_is_updated_in_place(step, given):
    before, after, best = donated(step, given)
    assert names(after).count("where") == names(before).count("where")
    assert "stack" not in names(after)
    expected = eagerly(step, given)
    for trace in (after, best):
        found, copies = run(trace, given)
        assert [each.tolist() for each in found] == expected[: len(found)]
        assert found[0] is copies[0]


def old_values_later(cache, new, place):
    updated, new = layers(cache, new, place)
    return updated, new + cache.sum()


def old_part_later(cache, new, place):
    old = cache[:, 0]
    updated, new = layers(cache, new, place)
    return updated, new + old.sum()


def old_values_in_an_output(cache, new, place):
    updated, _ = layers(cache, new, place)
    return updated, cache[:, 0, :1]


def new_values_of_the_cache(cache, new, place):
    return replaced(cache, cache[:, :1], place), new


def parts_in_another_order(cache, new, place):
    first, second = (replaced(cache[:, number], new, place) for number in range(LAYERS))
    return torch.stack([second, first], 1), new


def parts_along_another_dim(cache, new, place):
    parts = [replaced(cache[:, number], new, place) for number in range(LAYERS)]
    return torch.stack(parts, 0).transpose(0, 1), new


def part_of_another_tensor(cache, new, place):
    parts = [replaced(torch.ones(ROWS, LENGTH, WIDTH), new, place) for _ in range(LAYERS)]
    return torch.stack(parts, 1), new


def fewer_parts(cache, new, place):
    return torch.stack([replaced(cache[:, 0], new, place)], 1), new


def parts_of_a_view(cache, new, place):
    """Of its first two rows: `cache.transpose(0, 1)[n]` is `cache[:, n]`."""
    turned = cache[:2].transpose(0, 1)
    return torch.stack([replaced(turned[n], new[:2], place) for n in range(LAYERS)]), new


def output_twice(cache, new, place):
    updated, _ = layers(cache, new, place)
    return updated, updated


def view_of_the_output(cache, new, place):
    updated, _ = layers(cache, new, place)
    return updated, updated[:, 0, :1]


def written_later(cache, new, place):
    updated, new = layers(cache, new, place)
    updated.mul_(2)
    return updated, new


def overlapping_parts(cache, new, place):
    rows = cache[0]
    updated, new = layers(cache, new, place)
    return updated, new + rows.sum()


def strides_as_recorded(cache, new, place):
    part = replaced(cache[:, 0], new, place)
    new = new + part.as_strided((ROWS,), (LENGTH * WIDTH,))[:, None, None]
    return torch.stack([part, replaced(cache[:, 1], new, place)], 1), new


def number_in_a_tensor(cache, new, place):
    part = replaced(cache[:, 0], new, place)
    other = torch.add(part, part, alpha=place)
    return torch.stack([part, replaced(cache[:, 1], new, place)], 1), other


def strides_of_a_part(cache, new, place):
    part = replaced(cache[:, 0], new, place)
    return torch.stack([part, replaced(cache[:, 1], new, place)], 1), part.clone()


@pytest.mark.parametrize(
    "step",
    [
        old_values_later,
        old_part_later,
        old_values_in_an_output,
        parts_in_another_order,
        parts_along_another_dim,
        part_of_another_tensor,
        fewer_parts,
        output_twice,
        view_of_the_output,
        written_later,
        overlapping_parts,
        strides_as_recorded,
        number_in_a_tensor,
    ],
)
def test_a_cache_whose_old_values_are_needed_is_not_overwritten(step):
    given = tensors(LAYERS)
    before, after, best = donated(step, given)
    assert after is before
    expected = eagerly(step, given)
    for trace in (after, best):
        assert [each.tolist() for each in (*run(trace, given)[0], *given)] == expected


def test_a_part_of_the_cache_is_no_new_value_of_it():
    given = tensors()
    before, after, _ = donated(new_values_of_the_cache, given)
    assert after is before


def test_results_have_the_strides_of_the_recording():
    """A dim of one row has other strides in a part of the cache."""
    given = [each[:1] if each.ndim else each for each in tensors(LAYERS)]
    expected = strides_of_a_part(*given)
    for one_, other in zip(
        run(donated(strides_of_a_part, given)[2], given)[0], expected, strict=True
    ):
        assert torch.equal(one_, other)
        assert one_.stride() == other.stride()


def test_a_selection_from_a_view_is_no_part_of_the_input():
    given = [each[:2] if each.ndim else each for each in tensors(LAYERS)]
    before, after, _ = donated(parts_of_a_view, given)
    assert after is before


def test_memory_of_another_input_is_not_overwritten():
    cache, new, place = tensors(LAYERS)
    recorder = Recorder([cache, new, place, cache[:, 0]])
    recorder.run(lambda: layers(cache, new, place))
    recorder.trace.donated = 1
    assert with_donated_inputs(recorder.trace) is recorder.trace


def test_only_donated_inputs_are_overwritten():
    given = tensors(LAYERS)
    before, after, _ = donated(layers, given, count=0)
    assert after is before
