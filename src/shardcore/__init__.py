"""`keras.distribution` for Keras 3 on PyTorch: any Keras model, unchanged, across devices.

Importing shardcore loads neither torch nor Keras; `install()` does.
"""

from typing import TYPE_CHECKING, Any

from shardcore.domain.errors import ShardcoreError
from shardcore.domain.machines.collective_cost import Link

if TYPE_CHECKING:
    from shardcore.api import agree, explain, install, launch, status, uninstall, verify
    from shardcore.checkpoint_api import (
        ShardedCheckpoint,
        latest_checkpoint,
        load_checkpoint,
        save_checkpoint,
    )
    from shardcore.engines_api import join_engines
    from shardcore.plan_api import estimate_memory, plan, rules_report
    from shardcore.tensor_api import (
        all_gather,
        all_gather_variable,
        all_reduce,
        distribute_model,
        distribute_tensor,
        distribute_variable,
        ensure_dtensor,
        ensure_dtensor_input,
        mesh_info,
        parallelize_torch_module,
    )

__version__ = "0.1.0"

__all__ = [
    "Link", "ShardcoreError", "ShardedCheckpoint", "agree", "all_gather", "all_gather_variable",
    "all_reduce", "distribute_model", "distribute_tensor", "distribute_variable",
    "ensure_dtensor", "ensure_dtensor_input", "estimate_memory", "explain", "install",
    "join_engines", "latest_checkpoint", "launch", "load_checkpoint", "mesh_info",
    "parallelize_torch_module", "plan", "rules_report", "save_checkpoint", "status", "uninstall",
    "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardcore' has no attribute {name!r}")
    from shardcore import api, checkpoint_api, engines_api, plan_api, tensor_api

    modules = (api, plan_api, tensor_api, checkpoint_api, engines_api)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
