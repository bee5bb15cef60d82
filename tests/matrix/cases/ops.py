"""A call of every public function of `keras.ops`, as data.

Operands are drawn with few binary digits, so that a sum of parts is exact and no comparison,
sorting or rounding depends on the order of an addition. Dims are of even and of uneven size.
"""

from collections.abc import Callable
from typing import Any

import attrs
import keras
import numpy as np


@attrs.frozen
class Operand:
    """A tensor that the matrix places in all layouts: how its values are drawn."""

    shape: tuple[int, ...]
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

    def value(self, seed: int) -> np.ndarray:
        return np.asarray(self.draw(np.random.default_rng(seed), self.shape))


@attrs.frozen
class Case:
    """One call; `function` replaces the public function where that takes other functions."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = attrs.field(factory=dict)
    function: Callable[..., Any] | None = None
    fast: bool = False


def _steps(rng, shape):
    """Different multiples of 1/64 around, and without, zero."""
    size = int(np.prod(shape))
    values = (rng.permutation(size) - size // 2 + 0.5) * max(1, 128 // max(size, 1)) / 64
    return values.reshape(shape).astype("float32")


def f(*shape):
    """Floats of both signs."""
    return Operand(shape, _steps)


def p(*shape):
    """Floats above one half."""
    return Operand(shape, lambda rng, s: np.abs(_steps(rng, s)) + np.float32(0.5))


def u(*shape):
    """Floats between zero and one."""

    def draw(rng, s):
        size = int(np.prod(s))
        values = np.float32(np.round((rng.permutation(size) + 0.5) / size * 1024) / 1024)
        return np.clip(values, 1 / 64, 63 / 64).reshape(s)

    return Operand(shape, draw)


def i(high, *shape):
    """Integers from 0 below `high`."""
    return Operand(shape, lambda rng, s: rng.integers(0, high, s, dtype="int32"))


def b(*shape):
    """Booleans, both of them."""
    return Operand(shape, lambda rng, s: np.resize([True, False, False, True, True], s))


def v(values, dtype="float32"):
    """These values."""
    array = np.asarray(values, dtype)
    return Operand(array.shape, lambda rng, s: array)


def spd(*shape):
    """Symmetric matrices whose eigenvalues are positive and differ."""

    def draw(rng, s):
        n = s[-1]
        base = np.round(rng.uniform(-1, 1, s) * 16) / 64
        return np.float32(base + np.swapaxes(base, -1, -2) + np.diag(np.arange(2, n + 2)))

    return Operand(shape, draw)


def call(*args, **kwargs):
    return Case(args, kwargs)


def run(function, *operands):
    """A call of a function of the operands, for what takes functions."""
    return Case(operands, {}, function)


def fast(case):
    """Also in the part that every run of CI does."""
    return attrs.evolve(case, fast=True)


def _each(names, *cases):
    return {name: list(cases) for name in names.split()}


ops = keras.ops
NAN = v([[1, np.nan, -3], [np.nan, 5, 6], [7, -8, 0.5], [2, 3, np.nan]])
IMAGES = f(2, 6, 5, 3)
ROWS = (None, 1, {"axis": 0}, {"axis": 1, "keepdims": True})


def _reduction(x, **more):
    return [
        fast(call(x, **more)),
        call(x, axis=0, **more),
        fast(call(x, axis=1, keepdims=True, **more)),
        call(x, axis=(1, 0), **more),  # the last first, as Keras 3.13's `any` needs them
    ]


def _affine(images, transform):
    # Keras writes into `transform`, which torch refuses for a leaf.
    return ops.image.affine_transform(images, transform * 1)


def _gradient(x):
    return ops.grad(lambda y: ops.sum(y * y * y))(x)


def _arg(x):
    return [call(x), fast(call(x, axis=0)), call(x, axis=1, keepdims=True)]


_CASES: dict[str, list[Case]] = {
    # --- elementwise: one operand
    **_each(
        "abs absolute angle arcsinh arctan cbrt ceil conj conjugate cos cosh deg2rad exp exp2 "
        "expm1 fabs floor isfinite isinf isneginf isposinf isreal isnan nan_to_num negative "
        "rad2deg real reciprocal round sign signbit sin sinc sinh square tan tanh trunc i0 "
        "erf erfc celu elu gelu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu "
        "log_sigmoid relu relu6 selu sigmoid silu soft_shrink softplus softsign sparse_plus "
        "sparse_sigmoid squareplus swish tanh_shrink copy zeros_like ones_like empty_like "
        "stop_gradient convert_to_numpy convert_to_tensor shape size ndim dtype is_tensor ",
        call(f(4, 3)),
    ),
    **_each("log log10 log1p log2 sqrt rsqrt arccosh lgamma", call(p(4, 3))),
    **_each("arccos arcsin arctanh erfinv", call(u(4, 3))),
    **_each("logical_not", call(b(4, 3))),
    **_each("bitwise_invert bitwise_not", call(i(9, 4, 3))),
    "array": [call(f(4, 3))],
    "arccosh": [call(v([[1.5, 2], [3, 4], [5, 6]]))],
    "abs": [fast(call(f(4, 3))), fast(call(f(2, 5, 3)))],
    "relu": [fast(call(f(4, 3)))],
    "cast": [call(f(4, 3), "int32"), fast(call(f(4, 3), "bfloat16"))],
    "saturate_cast": [call(f(4, 3), "int8")],
    "clip": [call(f(4, 3), -0.5, 0.5), call(f(4, 3), f(3), 3.0)],
    "threshold": [call(f(4, 3), 0.25, -1.0)],
    "empty_like": [Case((f(4, 3),), {}, lambda x: ops.zeros_like(ops.empty_like(x)))],
    "full_like": [call(f(4, 3), 2.5)],
    "view": [call(f(4, 3), dtype="int32")],
    # --- elementwise: several operands
    **_each(
        "add subtract multiply maximum minimum fmax fmin hypot logaddexp logaddexp2 arctan2 "
        "heaviside nextafter copysign equal not_equal greater greater_equal less less_equal "
        "isclose divide true_divide divide_no_nan",
        call(f(4, 3), f(4, 3)),
        call(f(4, 3), f(3)),
    ),
    **_each("floor_divide mod fmod", call(f(4, 3), v([0.75, 1.25, -0.5]))),
    **_each("bitwise_and bitwise_or bitwise_xor", call(i(9, 4, 3), i(9, 4, 3))),
    **_each(
        "bitwise_left_shift left_shift bitwise_right_shift right_shift",
        call(i(9, 4, 3), v([1, 2, 0], "int32")),
    ),
    **_each("logical_and logical_or logical_xor", call(b(4, 3), b(3)), call(f(4, 3), f(4, 3))),
    **_each("float_power gammainc", call(p(4, 3), p(4, 3))),
    "gcd": [call(i(30, 4, 3), i(30, 4, 3))],
    "lcm": [call(i(30, 4, 3), i(30, 4, 3))],
    "ldexp": [call(f(4, 3), i(4, 4, 3))],
    "imag": [run(lambda x: ops.imag(ops.view_as_complex(x)), f(4, 3, 2))],
    "power": [fast(call(p(4, 3), f(4, 3))), call(f(4, 3), 2)],
    "polar": [call(p(4, 3), f(4, 3))],
    "allclose": [call(f(4, 3), f(4, 3)), fast(run(lambda x: ops.allclose(x, x), f(4, 3)))],
    "where": [
        fast(call(b(4, 3), f(4, 3), f(3))),
        call(f(4, 1), 1.0, f(3)),
        run(lambda x: ops.where(x > 0), f(4, 3)),
    ],
    "select": [call([b(4, 3), b(3)], [f(4, 3), f(4, 3)], 0.5)],
    # --- reductions
    **{
        name: _reduction(f(4, 3))
        for name in [
            "sum",
            "mean",
            "max",
            "min",
            "amax",
            "amin",
            "prod",
            "var",
            "std",
            "logsumexp",
            "ptp",
            "count_nonzero",
        ]
    },
    **{name: _reduction(b(4, 3)) for name in ["all", "any"]},
    **{
        name: _reduction(NAN)
        for name in ["nanmax", "nanmin", "nansum", "nanmean", "nanprod", "nanvar", "nanstd"]
    },
    **{name: _arg(f(4, 3)) for name in ["argmax", "argmin"]},
    **{name: [call(NAN), call(NAN, axis=0)] for name in ["nanargmax", "nanargmin"]},
    "ptp": [call(f(4, 3)), call(f(4, 3), axis=0)],
    "count_nonzero": [fast(call(b(4, 3))), call(f(4, 3), axis=0)],
    "median": [call(f(4, 3)), fast(call(f(4, 3), axis=0)), call(f(4, 3), axis=1, keepdims=True)],
    "nanmedian": [call(NAN), call(NAN, axis=0)],
    **_each(
        "quantile",
        fast(call(f(4, 3), 0.3)),
        call(f(4, 3), [0.25, 0.7], axis=0),
        call(f(4, 3), 0.3, axis=1, method="nearest", keepdims=True),
    ),
    "percentile": [call(f(4, 3), 30), call(f(4, 3), 60, axis=0)],
    "nanquantile": [call(NAN, 0.3), call(NAN, 0.3, axis=0)],
    "nanpercentile": [call(NAN, 30), call(NAN, 30, axis=0)],
    "average": [fast(call(f(4, 3), axis=1, weights=p(3))), call(f(4, 3))],
    "moments": [fast(call(f(4, 3), axes=[0])), call(f(4, 3, 2), axes=[0, 1], keepdims=True)],
    "norm": [
        fast(call(f(4, 3))),
        call(f(4, 3), axis=1),
        call(f(4, 3), ord=1, axis=0),
        call(f(4, 3), ord=np.inf),
        call(f(4, 3), ord="nuc"),
        call(f(4, 3), ord=2),
    ],
    "trace": [call(f(4, 3)), call(f(2, 3, 4), offset=1, axis1=1, axis2=2)],
    "histogram": [call(f(5), bins=4), call(f(6), bins=3, range=(-1, 1))],
    "bincount": [
        fast(call(v([1, 0, 2, 2, 5], "int32"))),
        call(v([1, 0, 2, 2, 5], "int32"), weights=p(5), minlength=8),
        call(i(4, 4, 3), minlength=4),
    ],
    **_each("cumsum cumprod", fast(call(f(4, 3), axis=0)), call(f(4, 3), axis=1), call(f(4, 3))),
    **_each("nancumsum nancumprod", call(NAN, axis=0), call(NAN, axis=1), call(NAN)),
    "diff": [call(f(4, 3)), call(f(5, 3), n=2, axis=0)],
    "trapezoid": [call(f(4, 3)), call(f(4, 3), x=v([0.5, 1, 3, 4]), axis=0)],
    # --- sorting and searching
    "sort": [fast(call(f(4, 3), axis=0)), call(f(4, 3)), call(f(2, 5, 3), axis=1)],
    "argsort": [fast(call(f(4, 3), axis=0)), call(f(4, 3)), call(f(4, 3), axis=None)],
    "argpartition": [Case((f(5, 3),), {}, lambda x: ops.sort(ops.argpartition(x, 2, 0)[:2], 0))],
    "top_k": [fast(call(f(4, 5), 2)), call(f(5), 3)],
    "in_top_k": [call(i(5, 4), f(4, 5), 2)],
    "searchsorted": [
        fast(call(v([1, 2, 4, 8, 9]), f(4, 3))),
        call(v([1, 2, 4]), f(5), side="right"),
    ],
    "digitize": [call(f(4, 3), v([-1, -0.25, 0.5, 1]))],
    "isin": [call(i(9, 4, 3), i(5, 3)), call(i(9, 5), i(5, 3), invert=True)],
    "nonzero": [fast(run(lambda x: ops.nonzero(x > 0), f(4, 3))), call(i(2, 5))],
    "unique": [
        fast(call(i(4, 4, 3))),
        call(i(4, 9), return_inverse=True, return_counts=True),
        call(v([[1, 2], [0, 3], [1, 2]]), axis=0),
    ],
    # --- shapes
    "reshape": [
        fast(call(f(4, 3), (3, 4))),
        fast(call(f(4, 3), (-1,))),
        call(f(4, 3), (2, 2, 3)),
        call(f(6, 2, 3), (2, 3, 6)),
        call(f(4, 6), (4, 3, 2)),
    ],
    "ravel": [fast(call(f(4, 3))), call(f(3, 2, 2))],
    "transpose": [fast(call(f(4, 3))), call(f(2, 5, 3), (2, 0, 1))],
    "swapaxes": [call(f(2, 5, 3), 0, 2)],
    "moveaxis": [call(f(2, 5, 3), 0, 2), call(f(2, 5, 3), (0, 1), (2, 0))],
    "expand_dims": [call(f(4, 3), 1), call(f(4, 3), (0, -1))],
    "squeeze": [call(f(4, 1, 3)), call(f(1, 4, 1), axis=0)],
    "broadcast_to": [fast(call(f(3), (4, 3))), call(f(4, 1), (4, 3))],
    "flip": [fast(call(f(4, 3), axis=0)), call(f(4, 3)), call(f(4, 3), axis=1)],
    "fliplr": [call(f(4, 3))],
    "flipud": [call(f(4, 3))],
    "roll": [fast(call(f(4, 3), 1)), call(f(4, 3), 2, axis=0), call(f(4, 3), -1, axis=1)],
    "rot90": [call(f(4, 3)), call(f(2, 4, 3), k=2, axes=(1, 2))],
    "repeat": [
        fast(call(f(4, 3), 2, axis=0)),
        call(f(4, 3), 3),
        call(f(4, 3), v([1, 2, 0], "int32"), axis=1),
    ],
    "tile": [call(f(4, 3), (2, 1)), call(f(4, 3), 2)],
    "pad": [
        fast(call(f(4, 3), ((1, 2), (0, 1)))),
        call(f(4, 3), 1, constant_values=2.5),
        call(f(4, 3), ((1, 1), (1, 1)), mode="reflect"),
        call(f(4, 3), ((0, 0), (2, 1)), mode="reflect"),
        call(f(4, 3), 1, mode="symmetric"),
        call(f(2, 4, 3), ((0, 0), (1, 2), (0, 0)), mode="reflect"),
    ],
    "concatenate": [
        fast(call([f(4, 3), f(2, 3)], axis=0)),
        call([f(4, 3), f(4, 2)], axis=1),
        call([f(4, 3), f(4, 3)], axis=-1),
    ],
    "append": [call(f(4, 3), f(5)), call(f(4, 3), f(4, 2), axis=1)],
    "stack": [fast(call([f(4, 3), f(4, 3)])), call([f(4, 3), f(4, 3)], axis=1)],
    **_each("hstack", call([f(4, 3), f(4, 2)]), call([f(3), f(2)])),
    **_each("vstack", call([f(4, 3), f(2, 3)]), call([f(3), f(3)])),
    "column_stack": [call([f(4, 3), f(4, 2)]), call([f(3), f(3)])],
    "dstack": [call([f(4, 3), f(4, 3)])],
    "split": [
        fast(call(f(4, 3), 2)),
        call(f(4, 6), 3, axis=1),
        call(f(5, 3), [1, 3], axis=0),
        call(f(4, 6), [2], axis=1),
    ],
    "array_split": [call(f(5, 3), 2), call(f(4, 3), 2, axis=1)],
    "hsplit": [call(f(4, 6), 2)],
    "vsplit": [call(f(4, 3), 2)],
    "dsplit": [call(f(2, 3, 4), 2)],
    "unstack": [fast(call(f(4, 3))), call(f(4, 3), axis=1)],
    "meshgrid": [call(f(4), f(3)), call(f(4), f(3), indexing="ij")],
    "diag": [fast(call(f(4, 3))), call(f(3)), call(f(4, 4), k=1)],
    "diagflat": [call(f(3)), call(f(2, 3), k=1)],
    "diagonal": [call(f(4, 3)), call(f(2, 3, 4), offset=1, axis1=1, axis2=2)],
    "tril": [call(f(4, 3)), call(f(4, 5), k=1)],
    "triu": [call(f(4, 3)), call(f(4, 5), k=-1)],
    "vander": [call(f(4)), call(f(5), 3, increasing=True)],
    "rearrange": [call(f(4, 6, 3), "a (b c) d -> (a b) c d", b=2), call(f(4, 3), "a b -> b a")],
    "unravel_index": [call(i(11, 5), (4, 3)), call(i(11, 2, 2), (2, 2, 3))],
    "view_as_complex": [call(f(4, 3, 2))],
    "view_as_real": [run(lambda x: ops.view_as_real(ops.view_as_complex(x)), f(4, 3, 2))],
    # --- indexing and updates
    "get_item": [
        fast(call(f(4, 3), 1)),
        call(f(4, 3), (slice(None), 2)),
        fast(call(f(4, 3), (slice(1, 3), slice(None, None, 2)))),
        call(f(4, 3), slice(None, None, 3)),
        call(f(4, 3), i(4, 5)),
        call(f(4, 3), (Ellipsis, None)),
        run(lambda x: x[x > 0], f(4, 3)),
        run(lambda x: x[ops.array([2, 0])], f(4, 3)),
        run(lambda x, j: x[:, j], f(4, 3), i(3, 4)),
        run(lambda x, j, k: x[j, k], f(4, 3), i(4, 5), i(3, 5)),
    ],
    "take": [
        fast(call(f(4, 3), i(4, 5), axis=0)),
        call(f(4, 3), i(3, 2, 2), axis=1),
        call(f(4, 3), i(12, 3)),
    ],
    "take_along_axis": [
        fast(call(f(4, 3), i(4, 4, 3), axis=0)),
        call(f(4, 3), i(3, 4, 2), axis=1),
        call(f(4, 3), i(12, 5), axis=None),
    ],
    "slice": [fast(call(f(4, 3), [1, 0], [2, 2])), call(f(5, 3), v([2, 1], "int32"), [3, 1])],
    "slice_update": [
        fast(call(f(4, 3), [1, 0], f(2, 2))),
        call(f(5, 3), [2, 0], f(3, 3)),
        call(f(4, 6), [0, 3], f(4, 3)),
        call(f(5, 3), v([2, 0], "int32"), f(2, 3)),
    ],
    "scatter": [call(v([[1], [3], [0]], "int32"), f(3, 3), (4, 3)), call(i(3, 5, 2), f(5), (4, 3))],
    "scatter_update": [
        fast(call(f(4, 3), v([[1, 0], [3, 2]], "int32"), f(2))),
        call(f(4, 3), v([[1], [3]], "int32"), f(2, 3)),
        call(f(4, 3), v([[1], [1]], "int32"), f(2, 3), reduction="add"),
        call(f(4, 3), v([[1], [1]], "int32"), f(2, 3), reduction="max"),
        call(f(4, 3), v([[1], [0]], "int32"), f(2, 3), reduction="min"),
        call(f(4, 3), v([[1], [2]], "int32"), f(2, 3), reduction="mul"),
    ],
    **{
        f"segment_{name}": [
            fast(call(f(5, 3), v([0, 0, 1, 3, 3], "int32"), num_segments=4)),
            call(f(5), v([2, 0, 1, 2, 0], "int32"), num_segments=3),
        ]
        for name in ["sum", "max", "min", "prod"]
    },
    "one_hot": [
        fast(call(i(5, 4, 3), 5)),
        call(i(5, 4), 5, axis=0),
        call(i(5, 4, 3), 5, axis=1, dtype="int32"),
    ],
    "multi_hot": [call(i(5, 4, 3), 5), call(i(5, 3), 5)],
    "extract_sequences": [call(f(3, 8), 3, 2)],
    # --- products
    "matmul": [
        fast(call(f(4, 3), f(3, 5))),
        call(f(2, 4, 3), f(2, 3, 5)),
        call(f(3), f(3, 4)),
        call(f(2, 4, 3), f(3)),
        call(f(2, 4, 3), f(3, 6)),
        call(i(5, 4, 3), i(5, 3, 5)),
    ],
    "dot": [call(f(4, 3), f(3, 5)), call(f(5), f(5)), call(f(2, 4, 3), f(3))],
    "inner": [call(f(4, 3), f(5, 3)), call(f(5), f(5))],
    "outer": [call(f(4), f(3)), call(f(2, 2), f(3))],
    "vdot": [call(f(5), f(5)), call(f(4), f(4))],
    "tensordot": [call(f(4, 3), f(3, 5), 1), call(f(2, 4, 3), f(4, 3, 5), [[1, 2], [0, 1]])],
    "einsum": [
        fast(call("abc,cd->abd", f(2, 4, 3), f(3, 5))),
        call("bqhd,bkhd->bhqk", f(2, 3, 4, 2), f(2, 5, 4, 2)),
        call("ab->a", f(4, 3)),
        call("aab->b", f(3, 3, 4)),
        call("abc,cde->abde", f(2, 4, 3), f(3, 2, 2)),
        call("abde,cde->abc", f(2, 4, 2, 2), f(3, 2, 2)),
    ],
    "kron": [call(f(2, 3), f(4, 1))],
    "cross": [call(f(4, 3), f(4, 3)), call(f(3), f(3))],
    "correlate": [call(f(6), f(3)), call(f(6), f(3), mode="same"), call(f(6), f(3), mode="full")],
    **_each("corrcoef cov", call(f(4, 5))),
    "cdist": [call(f(4, 3), f(5, 3))],
    # --- linear algebra
    "cholesky": [call(spd(3, 3)), call(spd(2, 4, 4))],
    "cholesky_inverse": [run(lambda x: ops.cholesky_inverse(ops.cholesky(x)), spd(3, 3))],
    "det": [call(spd(3, 3)), call(spd(2, 4, 4))],
    "slogdet": [call(spd(3, 3))],
    "logdet": [call(spd(2, 3, 3))],
    "inv": [fast(call(spd(3, 3))), call(spd(2, 4, 4))],
    "pinv": [call(f(4, 3))],
    "matrix_power": [call(f(3, 3), 3), call(f(2, 4, 4), 2)],
    "eig": [run(lambda x: ops.sort(ops.real(ops.eig(x)[0])), spd(3, 3))],
    "eigh": [run(lambda x: ops.eigh(x)[0], spd(3, 3)), run(lambda x: ops.eigh(x)[0], spd(2, 4, 4))],
    "svd": [call(f(4, 3), compute_uv=False), run(lambda x: ops.abs(ops.svd(x)[0]), f(4, 3))],
    "qr": [call(spd(4, 4)), run(lambda x: ops.qr(x, mode="reduced"), f(4, 3))],
    "lu_factor": [call(spd(3, 3)), call(spd(2, 4, 4))],
    "solve": [call(spd(3, 3), f(3, 2)), call(spd(2, 4, 4), f(2, 4))],
    "solve_triangular": [call(spd(3, 3), f(3, 2)), call(spd(4, 4), f(4, 3), lower=True)],
    "lstsq": [call(f(4, 3), f(4, 2))],
    "matrix_rank": [call(f(4, 3))],
    "jvp": [run(lambda x, t: ops.jvp(ops.sin, (x,), (t,)), f(4, 3), f(4, 3))],
    # --- signals
    "fft": [fast(call((f(4, 6), f(4, 6)))), call((f(5), f(5)))],
    "fft2": [call((f(2, 4, 3), f(2, 4, 3)))],
    "ifft2": [call((f(2, 4, 3), f(2, 4, 3)))],
    "rfft": [fast(call(f(4, 6))), call(f(3, 5), fft_length=4)],
    "irfft": [call((f(3, 4), f(3, 4))), call((f(3, 4), f(3, 4)), fft_length=5)],
    "stft": [call(f(2, 16), 4, 2, 4), call(f(16), 4, 2, 8, center=False)],
    "istft": [run(lambda x: ops.istft(ops.stft(x, 8, 2, 8), 8, 2, 8), f(2, 32))],
    # --- neural networks
    "softmax": [fast(call(f(4, 3))), call(f(4, 3), axis=0), call(f(2, 3, 4), axis=(1, 2))],
    "log_softmax": [fast(call(f(4, 3))), call(f(4, 3), axis=0), call(f(2, 3, 4), axis=(1, 2))],
    "sparsemax": [call(f(4, 3)), call(f(4, 3), axis=0)],
    "glu": [fast(call(f(4, 6))), call(f(4, 3), axis=0)],
    "gelu": [call(f(4, 3)), call(f(4, 3), approximate=False)],
    "normalize": [call(f(4, 3)), call(f(4, 3), axis=0, order=1)],
    "layer_normalization": [
        fast(call(f(4, 3), f(3), f(3))),
        call(f(2, 4, 3), axis=(1, 2)),
    ],
    "rms_normalization": [fast(call(f(4, 3), f(3))), call(f(2, 4, 3), axis=(1, 2))],
    "batch_normalization": [
        fast(call(f(4, 3), f(3), p(3), -1, f(3), f(3))),
        call(f(2, 3, 4), f(3), p(3), 1),
    ],
    "binary_crossentropy": [
        fast(call(u(4, 3), u(4, 3))),
        call(u(4, 3), f(4, 3), from_logits=True),
    ],
    "categorical_crossentropy": [
        fast(call(u(4, 3), u(4, 3))),
        call(u(4, 3), f(4, 3), from_logits=True),
        call(u(4, 3), f(4, 3), from_logits=True, axis=0),
    ],
    "sparse_categorical_crossentropy": [
        fast(call(i(3, 4), u(4, 3))),
        call(i(3, 4), f(4, 3), from_logits=True),
        call(i(3, 4, 2), f(4, 2, 3), from_logits=True),
    ],
    "ctc_loss": [
        call(
            v([[1, 2, 1], [2, 1, 0]], "int32"),
            f(2, 8, 3),
            v([3, 2], "int32"),
            v([8, 7], "int32"),
        )
    ],
    "ctc_decode": [
        call(u(2, 6, 4), v([6, 5], "int32")),
        call(u(2, 6, 4), v([6, 5], "int32"), strategy="beam_search", beam_width=4),
    ],
    "dot_product_attention": [
        fast(call(f(2, 3, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2))),
        call(f(2, 4, 3, 2), f(2, 4, 3, 2), f(2, 4, 3, 2), is_causal=True),
        call(f(2, 3, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), mask=b(2, 1, 3, 5)),
        call(f(2, 3, 4, 2), f(2, 5, 4, 2), f(2, 5, 4, 2), bias=f(2, 4, 3, 5)),
        call(f(2, 3, 4, 2), f(2, 5, 2, 2), f(2, 5, 2, 2)),
    ],
    "conv": [
        fast(call(f(4, 7, 3), f(2, 3, 4), padding="same")),
        call(f(3, 7, 4), f(2, 2, 6), strides=2),
        call(f(2, 7, 4), f(3, 4, 2), dilation_rate=2),
        fast(call(f(2, 6, 5, 3), f(3, 2, 3, 4), padding="valid")),
        call(f(2, 6, 5, 4), f(3, 3, 2, 6), strides=(2, 1), padding="same"),
        call(f(2, 3, 6, 5), f(2, 2, 3, 4), data_format="channels_first"),
        call(f(2, 4, 5, 3, 2), f(2, 2, 2, 2, 4), padding="same"),
    ],
    "conv_transpose": [
        fast(call(f(4, 5, 3), f(2, 4, 3), strides=2)),
        call(f(2, 4, 3, 3), f(3, 3, 2, 3), strides=2, padding="same"),
        call(f(2, 4, 3, 3), f(2, 2, 2, 3), strides=1, padding="valid"),
        call(f(2, 3, 2, 2, 2), f(2, 2, 2, 3, 2), strides=2),
    ],
    "depthwise_conv": [
        fast(call(f(4, 7, 3), f(2, 3, 2), padding="same")),
        call(f(2, 6, 5, 4), f(3, 2, 4, 1)),
        call(f(2, 6, 6, 3), f(3, 2, 3, 2), strides=2, padding="same"),
    ],
    "separable_conv": [
        call(f(4, 7, 3), f(2, 3, 2), f(1, 6, 4), padding="same"),
        call(f(2, 6, 5, 2), f(3, 2, 2, 2), f(1, 1, 4, 3)),
    ],
    **{
        f"{kind}_pool": [
            fast(call(f(4, 7, 3), 2, strides=2)),
            call(f(3, 7, 4), 3, strides=2, padding="same"),
            fast(call(f(2, 6, 5, 3), 2)),
            call(f(2, 6, 5, 3), (3, 2), strides=1, padding="same"),
            call(f(2, 3, 6, 5), 2, data_format="channels_first"),
            call(f(2, 4, 4, 3, 2), 2),
        ]
        for kind in ("max", "average")
    },
    **{
        f"adaptive_{kind}_pool": [
            fast(call(f(4, 7, 3), 2)),
            call(f(2, 6, 5, 3), (2, 3)),
            call(f(2, 4, 4, 3, 2), 2),
        ]
        for kind in ("max", "average")
    },
    "depth_to_space": [call(f(2, 3, 2, 8), 2), call(f(2, 8, 3, 2), 2, "channels_first")],
    "space_to_depth": [call(f(2, 4, 2, 3), 2), call(f(2, 3, 2, 4), 2, "channels_first")],
    "unfold": [call(f(2, 3, 4, 5), 2), call(f(2, 3, 4, 5), (3, 2), padding=1, stride=2)],
    "fold": [call(f(2, 12, 12), (4, 5), 2), call(f(3, 8, 4), (4, 4), 2, stride=2)],
    "psnr": [call(u(2, 4, 3), u(2, 4, 3), 1.0)],
    # --- control
    "cond": [
        fast(run(lambda x: ops.cond(ops.sum(x) > 0, lambda: x * 2, lambda: x * 3), f(4, 3))),
        run(lambda x: ops.cond(ops.max(x) > 1, lambda: x * 2, lambda: x * 3), f(4, 3)),
        run(lambda x: ops.cond(x > 4, lambda: x * 2, lambda: x * 3), v(5.0)),
    ],
    "switch": [
        run(lambda j, x: ops.switch(j, [lambda t: t, lambda t: t * 2], x), v(1, "int32"), f(4, 3)),
    ],
    "while_loop": [
        fast(
            run(
                lambda x: ops.while_loop(lambda t: ops.sum(ops.abs(t)) < 200, lambda t: t * 2, x),
                f(4, 3),
            )
        ),
    ],
    "fori_loop": [run(lambda x: ops.fori_loop(0, 3, lambda j, t: t * 2 + j, x), f(4, 3))],
    "map": [fast(run(lambda x: ops.map(lambda t: t * 2 + ops.sum(t), x), f(4, 3)))],
    "scan": [
        fast(run(lambda c, x: ops.scan(lambda s, t: (s + t, s * t), c, x), f(3), f(4, 3))),
        run(lambda c, x: ops.scan(lambda s, t: (s + t, s * t), c, x, reverse=True), f(3), f(4, 3)),
    ],
    "associative_scan": [
        run(lambda x: ops.associative_scan(lambda s, t: s + t, x), f(5, 3)),
        run(lambda x: ops.associative_scan(ops.maximum, x, axis=1), f(4, 3)),
    ],
    "grad": [run(_gradient, f(4, 3))],
    "vectorized_map": [
        fast(run(lambda x: ops.vectorized_map(lambda t: t * 2 + ops.sum(t), x), f(4, 3)))
    ],
    "vectorize": [
        run(ops.vectorize(lambda s, t: s * t + 1), f(4, 3), f(4, 3)),
    ],
    "custom_gradient": [
        run(
            ops.custom_gradient(
                lambda t: (t * 2, lambda *args, upstream=None: (args[0] if args else upstream) * 3)
            ),
            f(4, 3),
        )
    ],
    # --- from no tensor, or from its shape
    "arange": [call(5), call(1, 7, 2)],
    **_each("bartlett blackman hamming hanning", call(5)),
    "kaiser": [call(5, 14.0)],
    "eye": [call(4, 3, 1)],
    "identity": [call(4)],
    "tri": [call(4, 3, 1)],
    **_each("ones zeros", call((4, 3))),
    "empty": [run(lambda: ops.zeros_like(ops.empty((4, 3))))],
    "full": [call((4, 3), 2.5)],
    "linspace": [call(0, 1, 5), call(f(3), p(3), 5)],
    "logspace": [call(0, 1, 5), call(f(3), p(3), 4)],
    "geomspace": [call(1, 8, 4), call(p(3), p(3), 4)],
    # --- images
    "image.affine_transform": [
        run(_affine, IMAGES, v([[1, 0.25, 0, 0, 1, 0.5, 0, 0], [1, 0, 1, 0.25, 1, 0, 0, 0]])),
        run(_affine, f(6, 5, 3), v([1, 0.25, 0, 0, 1, 0.5, 0, 0])),
    ],
    "image.crop_images": [
        fast(call(IMAGES, top_cropping=1, left_cropping=2, target_height=3, target_width=2))
    ],
    "image.elastic_transform": [call(IMAGES, alpha=2.0, sigma=1.0, seed=1)],
    "image.extract_patches": [
        fast(call(IMAGES, 2)),
        call(IMAGES, (3, 2), strides=1, padding="same"),
        call(f(2, 3, 6, 5), 2, data_format="channels_first"),
    ],
    "image.extract_patches_3d": [call(f(2, 4, 4, 4, 3), 2)],
    "image.reconstruct_patches": [call(f(2, 3, 2, 12), 2)],
    "image.gaussian_blur": [fast(call(IMAGES)), call(f(6, 5, 3))],
    "image.hsv_to_rgb": [call(u(2, 4, 3, 3)), call(u(4, 3, 3))],
    "image.rgb_to_hsv": [call(u(2, 4, 3, 3))],
    "image.rgb_to_grayscale": [call(u(2, 4, 3, 3)), call(u(4, 3, 3))],
    "image.map_coordinates": [
        call(f(4, 5), u(2, 3), 1),
        call(f(4, 5), u(2, 3, 2), 0, fill_mode="nearest"),
        call(f(4, 5), p(2, 3), 1, fill_mode="reflect"),
    ],
    "image.pad_images": [
        call(IMAGES, top_padding=1, left_padding=2, target_height=8, target_width=9)
    ],
    "image.perspective_transform": [
        call(
            IMAGES,
            v([[[0, 0], [0, 4], [5, 0], [5, 4]]] * 2),
            v([[[0, 1], [0, 4], [5, 0], [4, 4]]] * 2),
        )
    ],
    "image.resize": [
        fast(call(IMAGES, (3, 4))),
        call(IMAGES, (7, 8), interpolation="nearest"),
        call(IMAGES, (7, 8), interpolation="bicubic"),
        call(IMAGES, (3, 4), antialias=True),
        call(IMAGES, (4, 4), crop_to_aspect_ratio=True),
        call(IMAGES, (4, 4), pad_to_aspect_ratio=True),
        call(f(2, 3, 6, 5), (3, 4), data_format="channels_first"),
    ],
    "image.scale_and_translate": [
        call(IMAGES, (2, 8, 6, 3), v([1.375, 1.25]), v([0.28125, 0.53125]), (1, 2), "linear"),
        call(
            f(6, 5),
            (4, 6),
            v([0.78125, 1.25]),
            v([0.28125, 0.53125]),
            (0, 1),
            "cubic",
            antialias=False,
        ),
    ],
    "image.sobel_edges": [call(IMAGES)],
    "image.ssim": [call(u(2, 12, 12, 3), u(2, 12, 12, 3), filter_size=5)],
}


def public_functions() -> dict[str, Callable[..., Any]]:
    """The public functions of `keras.ops` by name, those of `keras.ops.image` with a prefix.

    `keras.ops.numpy`, `nn` and `linalg` hold the same functions once more; one that is only
    there is found too.
    """
    found = {name: value for name, value in vars(ops).items() if _is_function(name, value)}
    for module in ("numpy", "nn", "linalg"):
        for name, value in vars(getattr(ops, module)).items():
            if _is_function(name, value) and found.get(name) is not value:
                found[f"{module}.{name}"] = value
    for name, value in vars(ops.image).items():
        if _is_function(name, value):
            found[f"image.{name}"] = value
    return dict(sorted(found.items()))


def _is_function(name: str, value: object) -> bool:
    return callable(value) and not name.startswith("_")


# Of the functions that this Keras has.
CASES = {name: cases for name, cases in _CASES.items() if name in public_functions()}
