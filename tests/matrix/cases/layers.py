"""Every public class of `keras.layers`, in each variant that takes another code path.

A case is a layer between two others: a `Dense` in front, whose sharded kernel gives the layer an
input that is sharded over channels and whose weights show the layer's input gradient, and a `Dense`
behind. `Plain` inputs, of images, labels and indices, have nothing in front.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from attrs import frozen

from tests.matrix.parity import TOLERANCE, Case

L = keras.layers
OUTPUTS = 3
Array = np.ndarray


@frozen
class Data:
    """One input: its shape without rows, and how it is drawn.

    Args:
        shape: of one row.
        draw: gives values of a shape.
        front: whether a `Dense` is put in front.
    """

    shape: tuple[int, ...]
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array]
    front: bool = False
    dtype: str = "float32"


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.normal(size=shape).astype("float32")


def reals(*shape: int) -> Data:
    return Data(shape, normal, front=True)


def plain(*shape: int) -> Data:
    return Data(shape, normal)


def image(*shape: int, high: float = 255) -> Data:
    return Data(shape, lambda rng, s: rng.uniform(0, high, s).astype("float32"))


def indices(high: int, *shape: int, low: int = 0) -> Data:
    return Data(shape, lambda rng, s: rng.integers(low, high, s).astype("int32"), dtype="int32")


def padded(*shape: int) -> Data:
    """Sequences whose last steps are zero, another number of them in each row."""

    def draw(rng: np.random.Generator, s: tuple[int, ...]) -> Array:
        values = normal(rng, s)
        for row in range(s[0]):
            values[row, 2 + row % (s[1] - 1) :] = 0
        return values

    return Data(shape, draw)


Apply = Callable[..., Any]


def case(
    name: str,
    make: Callable[[], Apply],
    *data: Data,
    rows: tuple[int, ...] = (5, 4, 5),
    policy: str = "float32",
    tolerance: float = TOLERANCE,
    head: bool = True,
    static: int | None = None,
) -> Case:
    """A case of one layer.

    Args:
        name: of the case.
        make: gives the layer, or a function of the inputs that calls it.
        *data: its inputs.
        rows: of each batch.
        policy: the dtype policy of all layers.
        tolerance: of the comparison.
        head: whether a `Dense` is put behind.
        static: the batch size, where the model must know it.
    """

    def build() -> Any:
        keras.config.set_dtype_policy(policy)
        inputs = [keras.Input(d.shape, batch_size=static, dtype=d.dtype) for d in data]
        layer = make()
        operands = [_front(x) if d.front else x for x, d in zip(inputs, data, strict=True)]
        model_inputs = inputs if len(inputs) > 1 else inputs[0]
        return compiled(keras.Model(model_inputs, _heads(layer(*operands), head)))

    def batch(rng: np.random.Generator, count: int) -> tuple[Any, ...]:
        x = [each.draw(rng, (count, *each.shape)) for each in data]
        return (x if len(x) > 1 else x[0]), None

    return Case(name, build, batch, rows, tolerance)


def _front(x: Any) -> Any:
    return L.Dense(x.shape[-1], name=f"front_{x.name}")(x)


def _heads(outputs: Any, head: bool) -> list[Any]:
    return [_head(each) if head else each for each in keras.tree.flatten(outputs)]


def _head(x: Any) -> Any:
    if x.dtype.startswith(("int", "bool", "uint")):
        x = L.Lambda(lambda v: keras.ops.cast(v, "float32"))(x)
    if len(x.shape) > 2:
        # A mask ends here: what the layers behind it do with it are other cases.
        x = Unmasked()(x)
        x = L.Flatten()(x)
    return L.Dense(OUTPUTS, dtype="float32")(x)


class Unmasked(L.Layer):
    def __init__(self):
        super().__init__()
        self.supports_masking = True

    def compute_mask(self, inputs, mask=None):
        return None

    def call(self, x, mask=None):
        if mask is None:
            return x
        mask = keras.ops.cast(mask, x.dtype)
        return x * keras.ops.reshape(mask, (*mask.shape, *(1,) * (len(x.shape) - len(mask.shape))))


def compiled(model: Any, **kwargs: Any) -> Any:
    """With a loss that needs no target: the squares of all outputs, shifted to be no minimum."""
    kwargs = {"loss": None, **kwargs}
    if kwargs["loss"] is None:
        inputs = model.inputs if len(model.inputs) > 1 else model.inputs[0]
        model = Squares(inputs, model.outputs)
    # A large epsilon: gradients that are zero in theory are noise, which Adam would make steps of.
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    if keras.config.dtype_policy().compute_dtype == "float16":
        # Far from overflow: ranks that sum fewer rows each overflow later than one device.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 256.0)
    kwargs.setdefault("optimizer", optimizer)
    model.compile(**kwargs)
    return model


class Squares(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        outputs = [keras.ops.cast(each, "float32") for each in keras.tree.flatten(y_pred)]
        loss = sum(keras.ops.mean(keras.ops.square(each - 0.5)) for each in outputs)
        for extra in self.losses:
            loss = loss + extra
        self._loss_tracker.update_state(loss)
        return loss


def both(make: Callable[[Any], Any]) -> Callable[[], Apply]:
    """A merging layer, called on a list."""
    return lambda: lambda *xs: make(None)(list(xs))


SEQ, PIC, VOL = reals(7, 4), reals(8, 6, 4), reals(5, 4, 6, 2)
SHORT = reals(4, 4)
ODD = reals(7, 5)  # channels that two ranks do not divide
IMG = image(8, 8, 3)
TOKENS = indices(11, 6)


def _dimensional(stem: str, kinds: str, make: Callable[[Any], Any], note: str = "") -> list[Case]:
    data = {"1D": SEQ, "2D": PIC, "3D": VOL}
    return [
        case(f"{stem}{d}{note}", lambda d=d: make(getattr(L, f"{stem}{d}")), data[d])
        for d in ("1D", "2D", "3D")
        if d[0] in kinds
    ]


def core() -> list[Case]:
    r = keras.regularizers
    return [
        case("Dense", lambda: L.Dense(6), reals(4)),
        case("Dense/odd", lambda: L.Dense(5, activation="gelu"), reals(7)),
        case("Dense/sequence", lambda: L.Dense(6, use_bias=False), SEQ),
        case("Dense/regularized", lambda: L.Dense(6, kernel_regularizer=r.L1L2(0.1, 0.1),
             bias_regularizer="l2", activity_regularizer=r.L2(0.1)), reals(4)),
        case("Dense/constrained", lambda: L.Dense(6, kernel_constraint="max_norm",
             bias_constraint="non_neg"), reals(4)),
        case("Dense/lora", lambda: L.Dense(6, lora_rank=2), reals(4)),
        case("Dense/mixed_bfloat16", lambda: L.Dense(6), reals(4), policy="mixed_bfloat16",
             tolerance=3e-2),
        case("Dense/mixed_float16", lambda: L.Dense(6), reals(4), policy="mixed_float16",
             tolerance=3e-2),
        case("Dense/float64", lambda: L.Dense(6, dtype="float64"), reals(4)),
        case("EinsumDense", lambda: L.EinsumDense("abc,cde->abde", (7, 2, 3), bias_axes="de"),
             SEQ),
        case("EinsumDense/ellipsis", lambda: L.EinsumDense("...x,xy->...y", 6, bias_axes="y"), SEQ),
        case("EinsumDense/contracted", lambda: L.EinsumDense("abc,bcd->ad", 6), SEQ),
        case("EinsumDense/lora", lambda: L.EinsumDense("abc,cd->abd", (7, 6), lora_rank=2), SEQ),
        case("Embedding", lambda: L.Embedding(11, 4), TOKENS),
        case("Embedding/even", lambda: L.Embedding(12, 4), TOKENS),
        case("Embedding/masked", lambda: L.Embedding(12, 4, mask_zero=True), TOKENS),
        case("Embedding/lora", lambda: L.Embedding(12, 4, lora_rank=2), TOKENS),
        case("Embedding/mixed_bfloat16", lambda: L.Embedding(12, 4), TOKENS,
             policy="mixed_bfloat16", tolerance=3e-2),
        case("Embedding/regularized", lambda: L.Embedding(12, 4, embeddings_regularizer="l2",
             embeddings_constraint="unit_norm"), TOKENS),
        case("ReversibleEmbedding", lambda: reversible(tie_weights=True), TOKENS),
        case("ReversibleEmbedding/untied", lambda: reversible(tie_weights=False), TOKENS),
        case("ReversibleEmbedding/cap", lambda: reversible(logit_soft_cap=2.0), TOKENS),
        case("TernaryDense", lambda: L.TernaryDense(6), reals(4)),
        case("Identity", L.Identity, reals(4)),
        case("Lambda", lambda: L.Lambda(lambda x: x * 2 + keras.ops.mean(x)), reals(4)),
        case("Masking", L.Masking, padded(6, 4)),
        case("InputLayer", L.Identity, reals(4)),
        case("Layer/subclass", Affine, reals(4)),
        case("Layer/state", Counter, reals(4)),
        case("Layer/add_loss", AddsLoss, reals(4)),
        case("Wrapper", lambda: Doubled(L.Dense(4)), reals(4)),
        case("Pipeline", lambda: L.Pipeline([L.Rescaling(0.5), L.Rescaling(2.0, 1.0)]), reals(4)),
        case("TorchModuleWrapper", torch_module, reals(4)),
        case("ActivityRegularization", lambda: L.ActivityRegularization(0.1, 0.1), reals(4)),
    ]  # fmt: skip


def reversible(**kwargs: Any) -> Apply:
    layer = L.ReversibleEmbedding(12, 4, **kwargs)
    return lambda x: layer(L.Dense(4)(layer(x)), reverse=True)


class Affine(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.matrix = self.add_weight(shape=(shape[-1], 6), name="kernel")

    def call(self, x):
        return keras.ops.matmul(x * self.scale, self.matrix)


class Counter(L.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
        self.sums = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(1)
            self.sums.assign(self.sums + keras.ops.sum(x, axis=0))
        return x * (1 + self.seen) + keras.ops.mean(self.sums)


class AddsLoss(L.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.abs(x)))
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(x)))
        return x


class Doubled(L.Wrapper):
    def call(self, x):
        return self.layer(x) * 2


def torch_module() -> Any:
    import torch

    return L.TorchModuleWrapper(torch.nn.Linear(4, 6), output_shape=(None, 6))


def activations() -> list[Case]:
    names = [
        "celu", "elu", "exponential", "gelu", "hard_shrink", "hard_sigmoid", "hard_silu",
        "hard_tanh", "leaky_relu", "linear", "log_sigmoid", "log_softmax", "mish", "relu", "relu6",
        "selu", "sigmoid", "silu", "soft_shrink", "softmax", "softplus", "softsign",
        "sparse_plus", "sparse_sigmoid", "sparsemax", "squareplus", "tanh", "tanh_shrink",
    ]  # fmt: skip
    found = [case(f"Activation/{n}", lambda n=n: L.Activation(n), SEQ) for n in names]
    return [
        *found,
        case("Activation/max_relu", lambda: L.ReLU(4.0, 0.1, 0.2), SEQ),
        case("ReLU", L.ReLU, SEQ),
        case("ELU", L.ELU, SEQ),
        case("LeakyReLU", L.LeakyReLU, SEQ),
        case("PReLU", L.PReLU, SEQ),
        case("PReLU/shared", lambda: L.PReLU(shared_axes=[1]), SEQ),
        case("Softmax", L.Softmax, SEQ),
        case("Softmax/axes", lambda: L.Softmax(axis=(1, 2)), SEQ),
    ]


def convolutions() -> list[Case]:
    first = {"data_format": "channels_first"}
    return [
        *_dimensional("Conv", "123", lambda c: c(4, 3)),
        *_dimensional("Conv", "123", lambda c: c(4, 3, padding="same"), "/same"),
        *_dimensional("Conv", "123", lambda c: c(4, 2, strides=2), "/strided"),
        *_dimensional("Conv", "123", lambda c: c(4, 2, dilation_rate=2), "/dilated"),
        *_dimensional("Conv", "123", lambda c: c(4, 3, groups=2), "/grouped"),
        *_dimensional("Conv", "12", lambda c: c(5, 3, use_bias=False), "/odd"),
        *_dimensional("Conv", "2", lambda c: c(4, 3, strides=2, padding="same"), "/strided same"),
        *_dimensional("Conv", "123", lambda c: c(4, 3, padding="same", **first), "/channels_first"),
        *_dimensional("Conv", "2", lambda c: c(4, 3, kernel_regularizer="l2"), "/regularized"),
        *_dimensional("Conv", "2", lambda c: c(4, 3, kernel_constraint="unit_norm"),
                      "/constrained"),
        case("Conv2D/lora", lambda: lora(L.Conv2D(4, 3)), PIC),
        case("Conv1D/lora", lambda: lora(L.Conv1D(4, 3)), SEQ),
        case("Conv3D/lora", lambda: lora(L.Conv3D(4, 2)), VOL),
        case("Conv2D/image", lambda: L.Conv2D(4, 3), image(8, 8, 3, high=1)),
        # One device is 3.5e-2 from float32 itself: Adam divides by a gradient near zero.
        case("Conv2D/mixed_bfloat16", lambda: L.Conv2D(4, 3), PIC, policy="mixed_bfloat16",
             tolerance=5e-2),
        case("Conv1D/causal", lambda: L.Conv1D(4, 3, padding="causal"), SEQ),
        case("Conv1D/causal dilated", lambda: L.Conv1D(4, 3, padding="causal", dilation_rate=2),
             SEQ),
        case("Conv1D/depthwise groups", lambda: L.Conv1D(4, 3, groups=4), SEQ),
        *_dimensional("DepthwiseConv", "12", lambda c: c(3)),
        *_dimensional("DepthwiseConv", "12", lambda c: c(3, padding="same", depth_multiplier=2),
                      "/multiplied"),
        *_dimensional("DepthwiseConv", "12", lambda c: c(2, strides=2), "/strided"),
        *_dimensional("DepthwiseConv", "12", lambda c: c(2, dilation_rate=2), "/dilated"),
        *_dimensional("DepthwiseConv", "12", lambda c: c(3, **first), "/channels_first"),
        case("DepthwiseConv2D/regularized", lambda: L.DepthwiseConv2D(3,
             depthwise_regularizer="l2", depthwise_constraint="max_norm"), PIC),
        *_dimensional("SeparableConv", "12", lambda c: c(4, 3)),
        *_dimensional("SeparableConv", "12", lambda c: c(4, 2, strides=2), "/strided"),
        *_dimensional("SeparableConv", "12", lambda c: c(4, 2, dilation_rate=2), "/dilated"),
        *_dimensional("SeparableConv", "12", lambda c: c(4, 3, **first), "/channels_first"),
        *_dimensional("SeparableConv", "12", lambda c: c(6, 3, padding="same", depth_multiplier=2),
                      "/multiplied"),
        case("Conv1DTranspose", lambda: L.Conv1DTranspose(4, 3), SEQ),
        case("Conv1DTranspose/strided", lambda: L.Conv1DTranspose(4, 3, strides=2, padding="same"),
             SEQ),
        case("Conv2DTranspose", lambda: L.Conv2DTranspose(4, 3), PIC),
        case("Conv2DTranspose/strided", lambda: L.Conv2DTranspose(4, 3, strides=2,
             padding="same"), PIC),
        case("Conv2DTranspose/dilated", lambda: L.Conv2DTranspose(4, 3, dilation_rate=2), PIC),
        case("Conv2DTranspose/channels_first", lambda: L.Conv2DTranspose(4, 3, **first), PIC),
        case("Conv3DTranspose", lambda: L.Conv3DTranspose(4, 3), VOL),
        case("Conv3DTranspose/strided", lambda: L.Conv3DTranspose(4, 2, strides=2), VOL),
    ]  # fmt: skip


def lora(layer: Any, *shape: int) -> Apply:
    def apply(x: Any) -> Any:
        layer.build(x.shape)
        layer.enable_lora(2)
        return layer(x)

    return apply


def pooling() -> list[Case]:
    found = []
    for kind in ("MaxPooling", "AveragePooling"):
        found += [
            *_dimensional(kind, "123", lambda c: c(2)),
            *_dimensional(kind, "123", lambda c: c(3, strides=2, padding="same"), "/same"),
            *_dimensional(kind, "123", lambda c: c(2, strides=1), "/overlapping"),
            *_dimensional(kind, "123", lambda c: c(2, data_format="channels_first"),
                          "/channels_first"),
        ]  # fmt: skip
    for kind in ("GlobalMaxPooling", "GlobalAveragePooling"):
        found += [
            *_dimensional(kind, "123", lambda c: c()),
            *_dimensional(kind, "123", lambda c: c(keepdims=True), "/keepdims"),
            *_dimensional(kind, "12", lambda c: c(data_format="channels_first"), "/channels_first"),
        ]
    for kind in ("AdaptiveMaxPooling", "AdaptiveAveragePooling"):
        found += [
            *_dimensional(kind, "123", lambda c: c(2)),
            *_dimensional(kind, "12", lambda c: c(3), "/uneven"),
        ]
    return [
        *found,
        case("GlobalAveragePooling1D/masked",
             lambda: lambda x: L.GlobalAveragePooling1D()(L.Masking()(x)), padded(6, 4)),
    ]  # fmt: skip


def normalization() -> list[Case]:
    bn = L.BatchNormalization
    trained = keras.initializers.RandomNormal(1.0, 0.1, seed=3)
    return [
        case("BatchNormalization", bn, reals(4)),
        case("BatchNormalization/sequence", lambda: bn(momentum=0.5), SEQ),
        case("BatchNormalization/picture", lambda: bn(momentum=0.5), PIC),
        case("BatchNormalization/odd", lambda: bn(momentum=0.5), ODD),
        case("BatchNormalization/axis", lambda: bn(axis=1, momentum=0.5), PIC),
        case("BatchNormalization/plain", lambda: bn(center=False, scale=False), PIC),
        case("BatchNormalization/renorm", lambda: bn(renorm=True, momentum=0.5), PIC),
        case("BatchNormalization/renorm clipped", lambda: bn(renorm=True, momentum=0.5,
             renorm_clipping={"rmax": 1.5, "rmin": 0.5, "dmax": 0.3}), PIC),
        case("BatchNormalization/masked", lambda: lambda x: bn(momentum=0.5)(L.Masking()(x)),
             padded(6, 4)),
        case("BatchNormalization/mixed_float16", lambda: bn(momentum=0.5), PIC,
             policy="mixed_float16", tolerance=3e-2),
        case("BatchNormalization/synchronized", lambda: bn(synchronized=True), PIC),
        case("LayerNormalization", lambda: L.LayerNormalization(gamma_initializer=trained), SEQ),
        case("LayerNormalization/mixed_bfloat16", L.LayerNormalization, SEQ,
             policy="mixed_bfloat16", tolerance=3e-2),
        case("LayerNormalization/axes", lambda: L.LayerNormalization(axis=[1, 2]), SEQ),
        case("LayerNormalization/other axis", lambda: L.LayerNormalization(axis=1), SEQ),
        case("LayerNormalization/plain", lambda: L.LayerNormalization(center=False, scale=False),
             SEQ),
        case("RMSNormalization", L.RMSNormalization, SEQ),
        case("RMSNormalization/axis", lambda: L.RMSNormalization(axis=1), SEQ),
        case("GroupNormalization", lambda: L.GroupNormalization(2), PIC),
        case("GroupNormalization/instance", lambda: L.GroupNormalization(-1), PIC),
        case("GroupNormalization/axis", lambda: L.GroupNormalization(2, axis=1), PIC),
        case("UnitNormalization", L.UnitNormalization, SEQ),
        case("UnitNormalization/axis", lambda: L.UnitNormalization(axis=[1, 2]), SEQ),
        case("SpectralNormalization", lambda: L.SpectralNormalization(L.Dense(6)), reals(4)),
        case("SpectralNormalization/convolution",
             lambda: L.SpectralNormalization(L.Conv2D(4, 3), power_iterations=2), PIC),
        case("Normalization", lambda: L.Normalization(mean=0.5, variance=2.0), SEQ),
        case("Normalization/vectors", lambda: L.Normalization(mean=[0.1, 0.2, 0.3, 0.4],
             variance=[1.0, 2.0, 3.0, 4.0]), SEQ),
        case("Normalization/invert", lambda: L.Normalization(mean=0.5, variance=2.0, invert=True),
             SEQ),
        case("Normalization/adapted", lambda: adapted(L.Normalization()), SEQ),
    ]  # fmt: skip


def adapted(layer: Any) -> Any:
    layer.adapt(np.random.default_rng(5).normal(size=(9, 7, 4)).astype("float32"))
    return layer


def regularization() -> list[Case]:
    return [
        case("Dropout", lambda: L.Dropout(0.4, seed=1), SEQ),
        case("Dropout/noise shape", lambda: L.Dropout(0.4, noise_shape=(None, 1, 4)), SEQ),
        case("Dropout/global seed", lambda: L.Dropout(0.4), SEQ),
        case("SpatialDropout1D", lambda: L.SpatialDropout1D(0.4), SEQ),
        case("SpatialDropout2D", lambda: L.SpatialDropout2D(0.4), PIC),
        case("SpatialDropout3D", lambda: L.SpatialDropout3D(0.4), VOL),
        case("GaussianDropout", lambda: L.GaussianDropout(0.4), SEQ),
        case("GaussianNoise", lambda: L.GaussianNoise(0.4), SEQ),
        case("AlphaDropout", lambda: L.AlphaDropout(0.4), SEQ),
    ]


def merging() -> list[Case]:
    two = (SEQ, SEQ)
    found = [
        case(name, both(lambda _, name=name: getattr(L, name)()), SEQ, SEQ)
        for name in ("Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract")
    ]
    return [
        *found,
        case("Add/broadcast", both(lambda _: L.Add()), SEQ, reals(4)),
        case("Concatenate", both(lambda _: L.Concatenate()), *two),
        case("Concatenate/axis", both(lambda _: L.Concatenate(axis=1)), SEQ, reals(3, 4)),
        case("Concatenate/three", both(lambda _: L.Concatenate()), SEQ, SEQ, ODD),
        case("Dot", both(lambda _: L.Dot(axes=2)), *two),
        case("Dot/axes", both(lambda _: L.Dot(axes=(1, 2))), SEQ, reals(3, 7)),
        case("Dot/normalized", both(lambda _: L.Dot(axes=1, normalize=True)), reals(4), reals(4)),
    ]


def reshaping() -> list[Case]:
    return [
        case("Flatten", L.Flatten, PIC),
        case("Flatten/channels_first", lambda: L.Flatten("channels_first"), PIC),
        case("Reshape", lambda: L.Reshape((4, 7)), SEQ),
        case("Reshape/split", lambda: L.Reshape((7, 2, 2)), SEQ),
        case("Reshape/unknown", lambda: L.Reshape((-1, 2)), SEQ),
        case("Permute", lambda: L.Permute((2, 1)), SEQ),
        case("RepeatVector", lambda: L.RepeatVector(3), reals(4)),
        *_dimensional("Cropping", "123", lambda c: c(1)),
        case("Cropping2D/channels_first", lambda: L.Cropping2D(1, data_format="channels_first"),
             PIC),
        *_dimensional("ZeroPadding", "123", lambda c: c(2)),
        case("ZeroPadding2D/asymmetric", lambda: L.ZeroPadding2D(((1, 0), (2, 1))), PIC),
        case("ZeroPadding2D/channels_first",
             lambda: L.ZeroPadding2D(1, data_format="channels_first"), PIC),
        *_dimensional("UpSampling", "123", lambda c: c(2)),
        case("UpSampling2D/bilinear", lambda: L.UpSampling2D(2, interpolation="bilinear"), PIC),
        case("UpSampling2D/channels_first",
             lambda: L.UpSampling2D(2, data_format="channels_first"), PIC),
    ]  # fmt: skip


def attention() -> list[Case]:
    mha, gqa = L.MultiHeadAttention, L.GroupQueryAttention
    return [
        case("MultiHeadAttention", lambda: lambda x: mha(2, 4)(x, x), SEQ),
        case("MultiHeadAttention/odd", lambda: lambda x: mha(3, 5)(x, x), ODD),
        case("MultiHeadAttention/causal", lambda: lambda x: mha(2, 4)(x, x, use_causal_mask=True),
             SEQ),
        case("MultiHeadAttention/cross", lambda: mha(2, 4), SEQ, reals(3, 6)),
        case("MultiHeadAttention/key", lambda: mha(2, 4), SEQ, SEQ, SEQ),
        case("MultiHeadAttention/dropout", lambda: lambda x: mha(2, 4, dropout=0.3)(x, x), SEQ),
        case("MultiHeadAttention/value", lambda: lambda x: mha(2, 4, value_dim=6, use_bias=False,
             output_shape=8)(x, x), SEQ),
        case("MultiHeadAttention/scores", lambda: lambda x: mha(2, 4)(x, x,
             return_attention_scores=True), SEQ),
        case("MultiHeadAttention/axes", lambda: lambda x: mha(2, 4, attention_axes=(1, 2))(x, x),
             PIC),
        case("MultiHeadAttention/window", lambda: lambda x: mha(2, 4, sliding_window=2)(x, x),
             SEQ),
        case("MultiHeadAttention/gate", lambda: lambda x: mha(2, 4, use_gate=True)(x, x), SEQ),
        case("MultiHeadAttention/padded", lambda: lambda x: masked_attention(mha(2, 4), x),
             padded(6, 4)),
        case("MultiHeadAttention/mask", lambda: lambda x, m: mha(2, 4)(x, x, attention_mask=m),
             SEQ, triangles(7)),
        case("MultiHeadAttention/mixed_bfloat16", lambda: lambda x: mha(2, 4)(x, x), SEQ,
             policy="mixed_bfloat16", tolerance=3e-2),
        case("GroupQueryAttention", lambda: lambda x: gqa(4, 4, 2)(x, x), SEQ),
        case("GroupQueryAttention/causal", lambda: lambda x: gqa(4, 4, 2)(x, x,
             use_causal_mask=True), SEQ),
        case("GroupQueryAttention/one", lambda: lambda x: gqa(4, 3, 1, dropout=0.2)(x, x), SEQ),
        case("GroupQueryAttention/scores", lambda: lambda x: gqa(4, 4, 2)(x, x,
             return_attention_scores=True), SEQ),
        case("GroupQueryAttention/window", lambda: lambda x: gqa(4, 4, 2, sliding_window=2,
             use_gate=True)(x, x), SEQ),
        case("Attention", both(lambda _: L.Attention()), SEQ, SEQ),
        case("Attention/scale", both(lambda _: L.Attention(use_scale=True)), SEQ, SEQ, SEQ),
        case("Attention/concat", both(lambda _: L.Attention(score_mode="concat", use_scale=True)),
             SEQ, reals(3, 4)),
        case("Attention/causal", lambda: lambda x: L.Attention(dropout=0.2)([x, x],
             use_causal_mask=True), SEQ),
        case("Attention/padded", lambda: lambda x: masked_attention(L.Attention(), x, pair=True),
             padded(6, 4)),
        case("AdditiveAttention", both(lambda _: L.AdditiveAttention()), SEQ, SEQ),
        case("AdditiveAttention/plain", both(lambda _: L.AdditiveAttention(use_scale=False,
             dropout=0.2)), SEQ, reals(3, 4)),
        case("AdditiveAttention/padded", lambda: lambda x: masked_attention(L.AdditiveAttention(),
             x, pair=True), padded(6, 4)),
    ]  # fmt: skip


def triangles(length: int) -> Data:
    def draw(_: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return np.broadcast_to(np.tri(length, dtype=bool), shape).copy()

    return Data((length, length), draw, dtype="bool")


def masked_attention(layer: Any, x: Any, pair: bool = False) -> Any:
    h = L.Masking()(x)
    return layer([h, h]) if pair else layer(h, h)


def recurrent() -> list[Case]:
    found = []
    for name in ("SimpleRNN", "GRU", "LSTM"):
        cls = getattr(L, name)
        options: dict[str, dict[str, Any]] = {
            "": {},
            "/sequences": {"return_sequences": True},
            "/state": {"return_state": True},
            "/backwards": {"go_backwards": True, "return_sequences": True},
            "/unrolled": {"unroll": True},
            "/dropout": {"dropout": 0.3, "recurrent_dropout": 0.2, "seed": 3},
            "/plain": {"use_bias": False, "activation": "relu"},
            "/regularized": {"kernel_regularizer": "l2", "recurrent_constraint": "max_norm"},
        }
        for note, kwargs in options.items():
            found.append(case(f"{name}{note}", lambda c=cls, k=kwargs: c(4, **k), SHORT))
        found += [
            case(f"{name}/odd", lambda c=cls: c(5), reals(4, 5)),
            case(f"{name}/masked", lambda c=cls: masked(c(4)), padded(4, 4)),
            case(f"{name}/masked sequences", lambda c=cls: masked(c(4, return_sequences=True)),
                 padded(4, 4)),
            case(f"{name}/masked unrolled", lambda c=cls: masked(c(4, unroll=True)), padded(4, 4)),
            case(f"{name}/zero output", lambda c=cls: masked(c(4, return_sequences=True,
                 zero_output_for_mask=True)), padded(4, 4)),
            case(f"{name}/stateful", lambda c=cls: c(4, stateful=True), SHORT, rows=(4, 4, 4),
                 static=4),
            case(f"{name}/uneven stateful", lambda c=cls: c(4, stateful=True), SHORT,
                 rows=(5, 5, 5), static=5),
            case(f"{name}/initial", lambda c=cls: initial(c(4), 2 if c is L.LSTM else 1), SHORT,
                 reals(4)),
            case(f"{name}Cell", lambda n=name: L.RNN(getattr(L, f"{n}Cell")(4)), SHORT),
        ]  # fmt: skip
    return [
        *found,
        # One device is 2e-2 from float32 here; a sum whose halves are rounded, as much again.
        case("GRU/mixed_bfloat16", lambda: L.GRU(4), SHORT, policy="mixed_bfloat16",
             tolerance=5e-2),
        case("GRU/reset before", lambda: L.GRU(4, reset_after=False), SHORT),
        case("LSTM/implementation", lambda: L.LSTM(4, implementation=1,
             recurrent_activation="hard_sigmoid"), SHORT),
        case("RNN/cell", lambda: L.RNN(Cell(4)), SHORT),
        case("StackedRNNCells", lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(4), L.GRUCell(3)])),
             SHORT),
        case("RNN/stacked masked", lambda: masked(L.RNN([L.GRUCell(4), L.LSTMCell(3)],
             return_sequences=True)), padded(4, 4)),
        case("Bidirectional", lambda: L.Bidirectional(L.LSTM(4)), SHORT),
        case("Bidirectional/sum", lambda: L.Bidirectional(L.GRU(4, return_sequences=True),
             merge_mode="sum"), SHORT),
        case("Bidirectional/masked", lambda: masked(L.Bidirectional(L.LSTM(4,
             return_sequences=True))), padded(4, 4)),
        case("Bidirectional/state", lambda: L.Bidirectional(L.LSTM(4, return_state=True)), SHORT),
        case("TimeDistributed", lambda: L.TimeDistributed(L.Dense(6)), SEQ),
        case("TimeDistributed/convolution", lambda: L.TimeDistributed(L.Conv2D(3, 2)),
             reals(3, 5, 5, 2)),
        case("TimeDistributed/masked", lambda: masked(L.TimeDistributed(L.Dense(6))),
             padded(4, 4)),
        case("TimeDistributed/normalization",
             lambda: L.TimeDistributed(L.BatchNormalization(momentum=0.5)), SHORT),
        case("ConvLSTM1D", lambda: L.ConvLSTM1D(4, 3), reals(3, 6, 2)),
        case("ConvLSTM1D/same", lambda: L.ConvLSTM1D(4, 3, padding="same", return_sequences=True,
             dropout=0.2), reals(3, 6, 2)),
        case("ConvLSTM2D", lambda: L.ConvLSTM2D(4, 3, padding="same"), reals(3, 5, 5, 2)),
        case("ConvLSTM3D", lambda: L.ConvLSTM3D(2, 2), reals(2, 3, 4, 3, 2)),
    ]  # fmt: skip


def masked(layer: Any) -> Apply:
    return lambda x: layer(L.Masking()(x))


def initial(layer: Any, states: int) -> Apply:
    return lambda x, s: layer(x, initial_state=[s] * states if states > 1 else s)


@keras.saving.register_keras_serializable("matrix")
class Cell(L.Layer):
    def __init__(self, units):
        super().__init__()
        self.state_size = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.state_size), name="kernel")
        self.recurrent = self.add_weight(
            shape=(self.state_size, self.state_size), initializer="orthogonal", name="recurrent"
        )

    def call(self, x, states):
        state = keras.ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
        return state, [state]


def preprocessing() -> list[Case]:
    ranged = {"value_range": (0, 255), "seed": 5}
    options: dict[str, dict[str, Any]] = {
        "AugMix": ranged,
        "RandAugment": ranged,
        "RandomBrightness": {"factor": 0.4, **ranged},
        "RandomColorDegeneration": {"factor": 0.4, **ranged},
        "RandomColorJitter": {"brightness_factor": 0.3, "contrast_factor": 0.3,
                              "saturation_factor": 0.3, "hue_factor": 0.3, **ranged},
        "RandomContrast": {"factor": 0.4, **ranged},
        "RandomElasticTransform": ranged,
        "RandomErasing": ranged,
        "RandomFlip": {"seed": 5},
        "RandomGaussianBlur": ranged,
        "RandomGrayscale": {"factor": 0.5, "seed": 5},
        "RandomHue": {"factor": 0.4, **ranged},
        "RandomInvert": {"factor": 0.5, **ranged},
        "RandomPerspective": {"factor": 1.0, "scale": 0.5, "seed": 5},
        "RandomPosterization": {"factor": 3, **ranged},
        "RandomRotation": {"factor": 0.3, "seed": 5},
        "RandomSaturation": {"factor": 0.4, **ranged},
        "RandomSharpness": {"factor": 0.4, **ranged},
        "RandomShear": {"x_factor": 0.3, "y_factor": 0.3, "seed": 5},
        "RandomTranslation": {"height_factor": 0.3, "width_factor": 0.3, "seed": 5},
        "RandomZoom": {"height_factor": 0.3, "seed": 5},
        "Solarization": {"addition_factor": 0.3, "threshold_factor": 0.3, **ranged},
        "AutoContrast": {"value_range": (0, 255)},
        "CenterCrop": {"height": 5, "width": 6},
        "ContrastLimitedAdaptiveHistogramEqualization": {"tile_grid_size": (2, 2)},
        "Equalization": {},
        "Rescaling": {"scale": 1 / 255, "offset": 0.1},
        "Resizing": {"height": 5, "width": 6},
        "CutMix": {"seed": 5},
        "MixUp": {"seed": 5},
        "Mosaic": {"seed": 5},
    }  # fmt: skip
    found = [
        case(name, lambda n=name, k=kwargs: getattr(L, n)(**k), IMG)
        for name, kwargs in options.items()
    ]
    return [
        *found,
        case("RandomCrop", lambda: lambda x: L.GlobalAveragePooling2D()(L.RandomCrop(5, 6,
             seed=5)(x)), IMG),
        case("RandomFlip/global seed", lambda: L.RandomFlip("horizontal"), IMG),
        case("RandomRotation/reflect", lambda: L.RandomRotation(0.3, fill_mode="nearest",
             interpolation="nearest"), IMG),
        case("RandomZoom/constant", lambda: L.RandomZoom(0.3, 0.2, fill_mode="constant"), IMG),
        case("Resizing/ratio", lambda: L.Resizing(6, 10, crop_to_aspect_ratio=True,
             interpolation="bicubic"), IMG),
        case("Resizing/pad", lambda: L.Resizing(6, 10, pad_to_aspect_ratio=True,
             interpolation="nearest"), IMG),
        case("Resizing/trained", lambda: L.Resizing(12, 9), PIC),
        case("CenterCrop/larger", lambda: L.CenterCrop(10, 12), IMG),
        case("MaxNumBoundingBoxes", lambda: boxes, IMG),
        case("CategoryEncoding", lambda: L.CategoryEncoding(12), TOKENS),
        case("CategoryEncoding/one_hot", lambda: L.CategoryEncoding(12, "one_hot"), TOKENS),
        case("CategoryEncoding/count", lambda: L.CategoryEncoding(12, "count"), TOKENS),
        case("Discretization", lambda: L.Discretization([-1.0, 0.0, 1.0]), SEQ),
        case("Discretization/one_hot", lambda: L.Discretization([-1.0, 0.0, 1.0],
             output_mode="one_hot"), plain(7)),
        case("Discretization/adapted", lambda: adapted(L.Discretization(num_bins=4)), SEQ),
        case("Hashing", lambda: L.Hashing(8), TOKENS),
        case("Hashing/one_hot", lambda: L.Hashing(8, salt=3, output_mode="multi_hot"), TOKENS),
        case("HashedCrossing", both(lambda _: L.HashedCrossing(8)), indices(11, 1), indices(11, 1)),
        case("IntegerLookup", lambda: L.IntegerLookup(vocabulary=[2, 4, 6]), TOKENS),
        case("IntegerLookup/multi_hot", lambda: L.IntegerLookup(vocabulary=[2, 4, 6],
             output_mode="multi_hot"), TOKENS),
        case("StringLookup", lambda: L.StringLookup(vocabulary=["a", "b"]), strings("a", "b")),
        case("TextVectorization", lambda: L.TextVectorization(vocabulary=["a", "b"]),
             strings("a b", "b")),
        case("MelSpectrogram", lambda: L.MelSpectrogram(16, 8, sampling_rate=100, num_mel_bins=4),
             plain(64)),
        case("STFTSpectrogram", lambda: L.STFTSpectrogram(frame_length=16, window=None),
             plain(64, 1)),
        case("STFTSpectrogram/real", lambda: L.STFTSpectrogram("real", 16, 8, window=None,
             padding="same", expand_dims=True), plain(64, 1)),
        case("JaxLayer", lambda: L.JaxLayer(lambda params, x: x, init_fn=lambda rng, x: {}),
             reals(4)),
        case("FlaxLayer", lambda: L.FlaxLayer(None), reals(4)),
        case("TFSMLayer", lambda: L.TFSMLayer("nowhere"), reals(4)),
    ]  # fmt: skip


def strings(*words: str) -> Data:
    return Data(
        (1,), lambda rng, shape: rng.choice(np.array(words, dtype=object), shape), dtype="string"
    )


def boxes(x: Any) -> Any:
    corners = keras.ops.stack([x[:, 0, :, 0], x[:, 1, :, 0], x[:, 2, :, 0], x[:, 3, :, 0]], axis=-1)
    layer = L.MaxNumBoundingBoxes(5, bounding_box_format="xyxy")
    found = layer({"images": x, "bounding_boxes": {"boxes": corners, "labels": x[:, 4, :, 0]}})
    return found["bounding_boxes"]["boxes"]


LAYERS = [
    *core(), *activations(), *convolutions(), *pooling(), *normalization(), *regularization(),
    *merging(), *reshaping(), *attention(), *recurrent(), *preprocessing(),
]  # fmt: skip

_TENSORFLOW = "Keras computes it with TensorFlow."
_BROKEN = "torch normalizes the last dims only, and Keras does not transpose."
# What plain Keras cannot run on one torch device either, and why.
NOT_ON_ONE_DEVICE = {
    "BatchNormalization/synchronized": "For TensorFlow only; shardcore's statistics are global.",
    "Discretization/adapted": _TENSORFLOW,
    "FlaxLayer": "For the JAX backend.",
    "GRU/stateful": "The state is overwritten before the backward pass reads it.",
    "GRU/uneven stateful": "The state is overwritten before the backward pass reads it.",
    "HashedCrossing": _TENSORFLOW,
    "Hashing": _TENSORFLOW,
    "Hashing/one_hot": _TENSORFLOW,
    "IntegerLookup": _TENSORFLOW,
    "IntegerLookup/multi_hot": _TENSORFLOW,
    "JaxLayer": "For the JAX backend.",
    "LSTM/stateful": "The state is overwritten before the backward pass reads it.",
    "LSTM/uneven stateful": "The state is overwritten before the backward pass reads it.",
    "LayerNormalization/other axis": _BROKEN,
    "RMSNormalization/axis": _BROKEN,
    "StringLookup": _TENSORFLOW,
    "TFSMLayer": "For the TensorFlow backend.",
    "TextVectorization": _TENSORFLOW,
}
# Those of them that other releases of Keras run.
RUN_BY_OTHER_RELEASES = {
    "GRU/stateful",
    "GRU/uneven stateful",
    "LSTM/stateful",
    "LSTM/uneven stateful",
    "LayerNormalization/other axis",
    "RMSNormalization/axis",
}
