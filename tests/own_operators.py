"""Operators of a user, with gradients: by `custom_op`, by a `Library`, by `autograd.Function`."""

import torch

import shardcore

RULES = {
    "scale": "n k, k -> n k",
    "scale_backward": "n k, n k, k -> n k, k",
    "project": "n k, k m, + m -> n m",
    "project_backward": "n m, n k, k m -> n k, k m",
}


@torch.library.custom_op("own_tests::scale", mutates_args=())
def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    assert x.shape[-1:] == weight.shape
    return x * weight


@torch.library.custom_op("own_tests::scale_backward", mutates_args=())
def scale_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return gradient * weight, (gradient * x).sum(0)


@scale.register_fake
def _(x, weight):
    return torch.empty_like(x)


@scale_backward.register_fake
def _(gradient, x, weight):
    return torch.empty_like(x), torch.empty_like(weight)


scale.register_autograd(
    lambda ctx, gradient: torch.ops.own_tests.scale_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

LIBRARY = torch.library.Library("own_tests", "FRAGMENT")
LIBRARY.define("project(Tensor x, Tensor kernel, Tensor? bias, *, float by=1.0) -> Tensor")
LIBRARY.define("project_backward(Tensor g, Tensor x, Tensor kernel, float by) -> (Tensor, Tensor)")


def _project(x, kernel, bias, *, by=1.0):
    product = (kernel.t() @ x.t()).t() * by  # a result in another order
    return product if bias is None else product + bias


def _project_backward(gradient, x, kernel, by):
    return gradient @ kernel.t() * by, x.t() @ gradient * by


for _key in ("CPU", "Meta"):
    LIBRARY.impl("project", _project, _key)
    LIBRARY.impl("project_backward", _project_backward, _key)


def _save(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.by, ctx.has_bias = keyword_only_inputs["by"], inputs[2] is not None


def _gradients(ctx, gradient):
    of_both = torch.ops.own_tests.project_backward(gradient, *ctx.saved_tensors, ctx.by)
    return *of_both, gradient.sum(0) if ctx.has_bias else None


torch.library.register_autograd("own_tests::project", _gradients, setup_context=_save, lib=LIBRARY)


class Scaled(torch.autograd.Function):
    """Calls its own operators in both passes, and those of torch."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.ops.own_tests.scale(x, weight) + 0.0

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return torch.ops.own_tests.scale(gradient, weight), (gradient * x).sum(0)


@torch.library.custom_op("own_tests::softmax", mutates_args=())
def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


@softmax.register_fake
def _(x):
    return torch.empty_like(x)


def operator(name):
    return getattr(torch.ops.own_tests, name).default


def declare_all():
    for name, rule in RULES.items():
        shardcore.operator_rule(operator(name), rule)
