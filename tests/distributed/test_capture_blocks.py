"""Pointwise chains on large tensors run in blocks, and give what the whole tensors give."""

import torch

from shardcore.adapters.capture.blocks import BlockSize
from shardcore.adapters.capture.generated import function_of
from shardcore.adapters.capture.passes.chains import in_blocks
from shardcore.adapters.capture.passes.lists import with_large_apart
from shardcore.adapters.capture.passes.told import with_results_told
from shardcore.adapters.capture.recorder import Recorder
from shardcore.testing import run_ranks
from tests.distributed.tapes import after, names

BLOCK = BlockSize(8, lanes=1)


def blocks(step, *tensors):
    return names(after(step, lambda tape: in_blocks(tape, BLOCK), *tensors))


X = torch.randn(6, 5)
Y = torch.randn(6, 5)


def test_what_hangs_together_is_one_call():
    assert blocks(lambda x, y: (((x * y) + 1).sqrt() - y.mul_(2)).relu(), X.abs(), Y.abs()) == [
        "in_blocks"
    ]


def test_only_what_others_read_is_ever_there_as_a_whole():
    recorder = Recorder([X])
    recorder.run(lambda: (X * 2 + 1).exp() - 3)
    (chain,) = in_blocks(recorder.tape, BLOCK).calls
    assert chain.result == [recorder.tape.outputs]


def test_what_is_read_in_between_ends_a_chain():
    def step(x):
        doubled = x * 2 + 1
        return doubled.sum() + (doubled - x).exp()

    assert blocks(step, X) == ["in_blocks", "sum", "in_blocks"]


def test_what_is_written_in_between_ends_a_chain():
    def step(x, y):
        before = x * 2 + y
        y[0].zero_()
        return before + y

    assert blocks(step, X, Y)[0] == "in_blocks"


def test_a_small_tensor_is_left_alone():
    assert blocks(lambda x: x * 2 + 1, torch.randn(7)) == ["mul", "add"]


def test_one_call_alone_stays_what_it_is():
    assert blocks(lambda x: (x * 2).sum(), X) == ["mul", "sum"]


def test_two_views_of_what_is_written_are_not_cut_alike():
    def step(x):
        flat = x.view(30)
        return x.mul_(2) + flat.flip(0).view(6, 5) + flat.view(5, 6).t()

    blocks(step, X)


def test_an_element_that_another_view_has_elsewhere_is_read_first():
    def step(x):
        turned = x.t()
        return x.add_(turned * 2)

    assert "in_blocks" not in blocks(step, torch.randn(6, 6))


def test_a_block_of_one_dim_takes_any_broadcast():
    for other in BROADCAST:
        x = torch.randn(3, 4, 5)
        tape = after(affine, lambda tape: in_blocks(tape, BlockSize(20, lanes=1)), x, other)
        assert names(tape) == ["in_blocks"], other


def test_dims_are_seen_as_one_where_all_operands_allow_it():
    x = torch.randn(3, 4, 5)
    found = [blocks(affine, x, other) == ["in_blocks"] for other in BROADCAST]
    assert found == [True] * 5 + [False] * 6 + [True]


def affine(x, other):
    return x * other + x


BROADCAST = [
    torch.randn(()),
    torch.randn(1),
    torch.randn(5),
    torch.randn(1, 1, 5),
    torch.randn(3, 4, 1),
    torch.randn(4, 5),
    torch.randn(1, 4, 1),
    torch.randn(3, 1, 1),
    torch.randn(3, 1, 5),
    torch.randn(4, 3, 5).transpose(0, 1),
    torch.randn(3, 4, 10)[:, :, ::2].transpose(0, 2).contiguous().transpose(0, 2),
    torch.randn(3, 4, 5) > 0,
]


def test_results_lie_as_they_lay():
    assert blocks(lambda x: x.t() * 2 + 1, X) == ["t", "in_blocks"]


def test_a_large_tensor_of_a_list_is_updated_block_by_block():
    def step(value, bias, moment, moment_of_bias, rate):
        values, moments = [value, bias], [moment, moment_of_bias]
        torch._foreach_mul_(moments, 0.9)
        torch._foreach_add_(moments, values, alpha=0.1)
        scaled = torch._foreach_div(torch._foreach_mul(moments, rate), torch._foreach_sqrt(values))
        torch._foreach_add_(values, scaled, alpha=-1)

    operands = X.abs(), X[0].abs(), Y, Y[0], torch.tensor(0.1)
    found = names(after(step, lambda tape: in_blocks(apart(tape), BLOCK), *operands))
    assert found.count("in_blocks") == 1
    assert [name for name in found if name != "in_blocks"] == [
        "_foreach_mul_",
        "_foreach_add_",
        "_foreach_mul",
        "_foreach_sqrt",
        "_foreach_div",
        "_foreach_add_",
    ]


def apart(tape):
    """With large tensors apart; as much is written as before."""
    found = with_large_apart(tape, BLOCK.elements)
    assert _written(found) == _written(tape)
    return found


def _written(tape):
    return sorted(value.number for call in tape.calls for value in call.writes)


def test_each_operator_on_lists_is_the_one_on_tensors():
    def step(x, y, number):
        a, b = [x, x[0]], [y, y[0]]
        one = torch._foreach_sub(torch._foreach_add(a, b, alpha=2), 0.3)
        two = torch._foreach_mul(torch._foreach_abs(b), number)
        torch._foreach_sub_(one, two, alpha=0.7)
        torch._foreach_div_(one, b)
        return torch._foreach_neg(torch._foreach_add(one, number, alpha=3))

    found = names(after(step, apart, X, Y, torch.tensor(0.7)))
    singles = {name for name in found if not name.startswith("_foreach_")} - {"select"}
    assert singles == {"add", "sub", "abs", "mul", "sub_", "div_", "neg"}


def told(step, *tensors):
    """The operators of `step` that are told where to write, and all of them."""
    recorder = Recorder(tensors)
    outputs = recorder.run(lambda: step(*tensors))
    recorder.tape.outputs = tuple(recorder.tape.outputs)
    tape = with_results_told(recorder.tape)
    into = [torch.empty_like(each) for each in outputs]
    for one, other in zip(function_of(tape, {})(*tensors, *into), outputs, strict=True):
        assert torch.equal(one, other)
    names = [call.operator.__name__ for call in tape.calls]
    return [name.endswith(("out", "grad_input")) for name in names], into, outputs


def test_a_result_is_written_where_it_is_to_be():
    are_told, into, outputs = told(lambda x, y: ((x * y) + 1, x - y), X, Y)
    assert are_told == [False, True, True]
    assert all(map(torch.equal, into, outputs))


def test_what_nobody_reads_any_more_gives_its_memory():
    are_told, _, _ = told(lambda x, y: ((x * y + 1).exp() / y - x,), X, Y)
    assert are_told == [False, True, True, True, True]


def test_what_is_read_later_keeps_its_memory():
    def step(x, y):
        product = x * y
        return ((product + 1) - product,)

    assert told(step, X, Y)[0] == [False, False, True]


def test_what_is_of_another_kind_takes_no_memory_of_it():
    def step(x, y):
        return (torch.bitwise_and((x * y) > 0, x > 0),)

    assert told(step, X, Y)[0] == [False, False, False, True]


def test_what_an_operator_without_a_variant_of_its_own_makes_is_copied():
    are_told, into, (result,) = told(lambda x: (torch.ops.aten.mul.Scalar(x, 2.0),), X)
    assert are_told == [False, False]
    assert torch.equal(into[0], result)


@torch.library.custom_op("shardcore_tests::cubed", mutates_args=(), tags=(torch.Tag.pointwise,))
def cubed(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


def test_a_pointwise_operator_of_somebody_else_s_is_in_blocks_too():
    assert blocks(lambda x: cubed(x * 2) + 1, X) == ["in_blocks"]


def test_no_block_ends_amid_what_torch_computes_at_once():
    """A remainder is computed one by one, with other last bits."""
    x = torch.rand(512, 601, generator=torch.Generator().manual_seed(0))
    assert names(after(rounded_by_vectors, in_blocks, x)) == ["in_blocks"]


def rounded_by_vectors(x):
    return torch.nn.functional.softplus(x + 0.1).sigmoid()


def test_no_tensor_is_cut_across():
    """A block of columns would be many short pieces of memory, with a remainder each."""
    x = torch.rand(640, 512, generator=torch.Generator().manual_seed(0))
    found = names(after(lambda x: rounded_by_vectors(x.t()), in_blocks, x))
    assert "in_blocks" not in found
    found = names(after(lambda x, y: rounded_by_vectors(x + y.t()), in_blocks, x, x.t().clone()))
    assert found == ["t", "in_blocks"]


def test_of_several_threads_each_begins_where_it_may():
    """Blocks begin elsewhere: what would have other last bits there is in none."""

    def program(rank):
        torch.set_num_threads(2)
        x = torch.rand(300_010, generator=torch.Generator().manual_seed(0))
        sums = after(lambda x: (x * 3 + 1).sqrt().sub(x, alpha=1) ** 2 / 7, in_blocks, x)
        found = after(lambda x: rounded_by_vectors(x) * 2 + 1, in_blocks, x)
        y = torch.complex(x, 1 - x)
        products = after(lambda y: y * y * y, in_blocks, y)
        return names(sums), names(products), names(found)

    ((sums, products, found),) = run_ranks(program, 1, timeout=60)
    assert sums == ["in_blocks"]
    assert products == ["mul", "mul"]
    assert found == ["add", "softplus", "sigmoid", "in_blocks"]
