"""Banks of experts: layers whose variables have one slice for each expert."""

from shardcore.ports.model import LayerFacts


def experts_of(layer: LayerFacts) -> int | None:
    """Returns the number of experts in a bank, None if `layer` is none.

    A bank has its own variables only, all with the experts as first dim. Its first kernel takes the
    width that its last one gives.

    Example:
        >>> from shardcore.ports.model import VariableFacts
        >>> up, down = VariableFacts("bank/up", (4, 8, 32)), VariableFacts("bank/down", (4, 32, 8))
        >>> experts_of(LayerFacts("bank", ("Experts",), variables=(up, down)))
        4
    """
    kernels = [each.shape for each in layer.variables if len(each.shape) == 3]
    counts = {each.shape[:1] for each in layer.variables}
    if layer.children or len(kernels) < 2 or len(counts) != 1:
        return None
    return kernels[0][0] if kernels[0][1] == kernels[-1][2] else None
