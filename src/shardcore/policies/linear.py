"""Layers that multiply by a kernel, banks of experts, and layers that compute channelwise."""

import attrs

from shardcore.policies.specs import all_replicated, sharded
from shardcore.ports.policy import Choice, LayerFacts, VariableFacts

# Elementwise activations, by name in small letters. Any other, such as softmax, needs all channels.
_ELEMENTWISE = """
linear relu relu6 leaky_relu leakyrelu elu selu celu gelu gelu_approximate silu swish sigmoid
hard_sigmoid log_sigmoid hard_silu hard_swish tanh hard_tanh tanh_shrink softplus softsign
soft_shrink hard_shrink exponential mish squareplus sparse_plus sparse_sigmoid threshold
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())

# Layers and operations that compute each channel separately: channel i of the output depends on
# channel i of the inputs only. Of two spellings one is a layer's, the other an operation's.
_CHANNELWISE = """
Activation ReLU Relu LeakyReLU LeakyRelu ELU Elu Relu6 Gelu Silu Sigmoid Tanh Selu Celu Softplus
Softsign HardSigmoid HardSilu LogSigmoid Dropout GaussianDropout GaussianNoise AlphaDropout
SpatialDropout1D SpatialDropout2D SpatialDropout3D Identity Rescaling BatchNormalization
MaxPooling1D MaxPooling2D MaxPooling3D AveragePooling1D AveragePooling2D AveragePooling3D
GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GlobalAveragePooling1D
GlobalAveragePooling2D GlobalAveragePooling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
Cropping1D Cropping2D Cropping3D UpSampling1D UpSampling2D UpSampling3D
Add Subtract Multiply Average Maximum Minimum Divide TrueDivide Negative Absolute Square Sqrt Exp
"""
CHANNELWISE = frozenset(_CHANNELWISE.split())


@attrs.frozen
class Linear:
    """A layer whose kernel maps one width to another."""

    layer: LayerFacts
    kernel: VariableFacts
    in_dim: int  # the dim of the kernel that is contracted
    out_dim: int  # the dim of the kernel that becomes the width of the output
    new_dims: int = 1  # the number of output dims from the kernel: two if it makes heads

    @property
    def path(self) -> str:
        """The path of the kernel, which identifies the layer."""
        return self.kernel.path

    @property
    def bias(self) -> VariableFacts | None:
        """Its bias, None without one."""
        return self.layer.variable("bias")

    @property
    def width_in(self) -> int:
        """The width that is contracted."""
        return self.kernel.shape[self.in_dim]

    @property
    def width_out(self) -> int:
        """The width of the output."""
        return self.kernel.shape[self.out_dim]

    @property
    def is_elementwise(self) -> bool:
        """Whether its activation is elementwise."""
        return _is_elementwise(self.layer)

    def columns(self, axis: str, reason: str) -> dict[str, Choice]:
        """Shards its variables by the width of the output."""
        choices = {self.path: Choice(sharded(self.kernel, self.out_dim, axis), reason)}
        if self.bias is not None and len(self.bias.shape) >= self.new_dims:
            choices[self.bias.path] = Choice(sharded(self.bias, -self.new_dims, axis), reason)
        return choices

    def rows(self, axis: str, reason: str) -> dict[str, Choice]:
        """Shards its kernel by the width that is contracted; its bias is added to the sum."""
        choices = {self.path: Choice(sharded(self.kernel, self.in_dim, axis), reason)}
        return choices | all_replicated([self.bias] if self.bias else [], "added to the sum")


def as_linear(layer: LayerFacts) -> Linear | None:
    """Reads a layer as a `Linear`, None if it is not linear or its channels are not last."""
    kernel = layer.variable("kernel")
    if kernel is None:
        return None
    ndim = len(kernel.shape)
    if layer.is_a("Dense") and ndim == 2:
        return Linear(layer, kernel, 0, 1)
    if layer.is_a("BaseConv") and layer.config.get("groups", 1) == 1 and _is_channels_last(layer):
        return Linear(layer, kernel, ndim - 2, ndim - 1)
    if layer.is_a("EinsumDense") and ndim == 2:  # a Dense of other letters
        return as_einsum(layer, summed=1, new=1)
    return None


def as_einsum(layer: LayerFacts, summed: int, new: int) -> Linear | None:
    """Reads an `EinsumDense` whose kernel has these numbers of contracted and of new dims."""
    kernel, dims = layer.variable("kernel"), _einsum_dims(layer)
    if kernel is None or dims is None or tuple(map(len, dims)) != (summed, new):
        return None
    (first_summed, *_), (first_new, *_) = dims
    return Linear(layer, kernel, first_summed, first_new, new)


def _einsum_dims(layer: LayerFacts) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Parses the kernel's contracted dims, in the order of the input, and its new dims.

    None if the equation is unknown, or a dim of the kernel is neither.

    Example:
        >>> query = LayerFacts("query", ("EinsumDense",), {"equation": "abc,cde->abde"})
        >>> _einsum_dims(query)
        ((0,), (1, 2))
    """
    operands, arrow, output = str(layer.config.get("equation", "")).replace(" ", "").partition("->")
    given, comma, kernel = operands.partition(",")
    if not arrow or not comma:
        return None
    summed = [letter for letter in given if letter in kernel and letter not in output]
    new = [letter for letter in output if letter in kernel and letter not in given]
    if len(summed) + len(new) != len(kernel):
        return None
    return tuple(map(kernel.index, summed)), tuple(map(kernel.index, new))


def is_channelwise(layer: LayerFacts) -> bool:
    """Tells whether `layer` computes each channel of the last dim separately."""
    if not layer.is_a(*CHANNELWISE) or not _is_channels_last(layer):
        return False
    if layer.is_a("BatchNormalization"):
        return layer.config.get("axis") == -1
    return _is_elementwise(layer)


def _is_channels_last(layer: LayerFacts) -> bool:
    return layer.config.get("data_format") != "channels_first"


def _is_elementwise(layer: LayerFacts) -> bool:
    return str(layer.config.get("activation", "linear")).lower() in ELEMENTWISE


@attrs.frozen
class Bank:
    """The variables of a layer that have the experts as first dim."""

    experts: int
    variables: tuple[VariableFacts, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all experts."""
        return sum(variable.bytes for variable in self.variables)


def bank_of(layer: LayerFacts) -> Bank | None:
    """Finds the bank of a layer, None if it has none.

    A layer has a bank if it has several kernels `(experts, in, out)`, and the first one takes the
    width that the last one gives. Biases `(experts, width)` belong to it. A router does not.

    Example:
        >>> shapes = {"router": (8, 4), "up": (4, 8, 32), "up_bias": (4, 32), "down": (4, 32, 8)}
        >>> variables = tuple(VariableFacts(f"moe/{name}", shapes[name]) for name in shapes)
        >>> bank = bank_of(LayerFacts("moe", ("Moe",), variables=variables))
        >>> bank.experts, [variable.name for variable in bank.variables]
        (4, ['up', 'up_bias', 'down'])
    """
    kernels = [variable.shape for variable in layer.variables if len(variable.shape) == 3]
    counts = {shape[0] for shape in kernels}
    if len(kernels) < 2 or len(counts) != 1 or kernels[0][1] != kernels[-1][2]:
        return None
    (experts,) = counts
    widths = {shape[2] for shape in kernels} - {experts}
    return Bank(experts, tuple(v for v in layer.variables if _has_experts(v, experts, widths)))


def _has_experts(variable: VariableFacts, experts: int, widths: set[int]) -> bool:
    first, *rest = variable.shape or (0,)
    return first == experts and bool(rest) and (len(rest) > 1 or rest[0] in widths)


def einsum_bank(layer: LayerFacts) -> Bank | None:
    """Finds the bank of an EinsumDense that multiplies each expert's tokens by its kernel.

    Example:
        >>> variables = (VariableFacts("up/kernel", (4, 8, 32)), VariableFacts("up/bias", (32,)))
        >>> config = {"equation": "gecd,edh->gech"}
        >>> bank = einsum_bank(LayerFacts("up", ("EinsumDense",), config, variables))
        >>> bank.experts, [variable.name for variable in bank.variables]
        (4, ['kernel'])
    """
    kernel = layer.variable("kernel") if layer.is_a("EinsumDense") else None
    operands, arrow, output = str(layer.config.get("equation", "")).replace(" ", "").partition("->")
    given, comma, letters = operands.partition(",")
    if kernel is None or not arrow or not comma or len(letters) != len(kernel.shape) or not letters:
        return None
    first, rest = letters[0], letters[1:]
    if first not in given or first not in output or len(rest) != 2:
        return None
    contracted_and_new = {(True, False), (False, True)}
    if {(letter in given, letter in output) for letter in rest} != contracted_and_new:
        return None
    experts = kernel.shape[0]
    return Bank(
        experts, tuple(v for v in layer.variables if len(v.shape) > 1 and v.shape[0] == experts)
    )
