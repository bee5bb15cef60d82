"""Banks of experts: variables of a layer that have one slice for each expert."""

import attrs

from shardcore.ports.model import LayerFacts, VariableFacts


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
    """Returns the bank of a layer, None if it has none.

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
    """Returns the bank of an EinsumDense that multiplies each expert's tokens by its kernel.

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
