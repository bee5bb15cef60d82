"""Whether what an adapter needs is there. Asked before any adapter is imported."""

import importlib


def why_no_dtensor() -> str | None:
    """None where `torch.distributed.tensor` can be used, else the reason and the remedy."""
    try:
        distributed = importlib.import_module("torch.distributed")
        importlib.import_module("torch.distributed.tensor")
    except ImportError as error:
        return (
            f'DTensor is not available: {error}. Install a torch that has it, "torch>=2.13,<2.14".'
        )
    if not distributed.is_available():
        return "DTensor is not available: this torch was built without torch.distributed."
    return None


def why_no_collectives() -> str | None:
    """None where torch has collectives, else the reason and the remedy."""
    try:
        distributed = importlib.import_module("torch.distributed")
    except ImportError as error:
        return f'torch.distributed is not available: {error}. Install "torch>=2.13,<2.14".'
    if not distributed.is_available():
        return "This torch was built without torch.distributed: install one that has it."
    return None
