"""`keras.distribution` for Keras 3 on PyTorch: any Keras model, unchanged, across devices.

Importing shardcore loads neither torch nor Keras. `install()` does, and the first use of
`shardcore.ShardedCheckpoint` or `shardcore.StepStats`, which are Keras callbacks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardcore.domain.cost.collective_cost import Link as Link
from shardcore.domain.errors import ShardcoreError as ShardcoreError

if TYPE_CHECKING:
    from shardcore.api import (  # noqa: I001 - `as` tells type checkers that it is public
        agree as agree,
        explain as explain,
        install as install,
        launch as launch,
        operator_rule as operator_rule,
        status as status,
        uninstall as uninstall,
        verify as verify,
    )
    from shardcore.callback_api import ShardedCheckpoint as ShardedCheckpoint
    from shardcore.callback_api import StepStats as StepStats
    from shardcore.checkpoint_api import (
        latest_checkpoint as latest_checkpoint,
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from shardcore.engines_api import join_engines as join_engines
    from shardcore.files_api import (
        load_dcp as load_dcp,
        load_orbax as load_orbax,
        load_safetensors as load_safetensors,
        save_dcp as save_dcp,
        save_safetensors as save_safetensors,
    )
    from shardcore.plan_api import (
        build as build,
        estimate_memory as estimate_memory,
        plan as plan,
        rules_report as rules_report,
    )
    from shardcore.tensor_api import (
        all_gather as all_gather,
        all_gather_variable as all_gather_variable,
        all_reduce as all_reduce,
        distribute_model as distribute_model,
        distribute_tensor as distribute_tensor,
        distribute_variable as distribute_variable,
        ensure_dtensor as ensure_dtensor,
        ensure_dtensor_input as ensure_dtensor_input,
        mesh_info as mesh_info,
        parallelize_torch_module as parallelize_torch_module,
        resize as resize,
    )

__version__ = "0.1.0"

# The public names by their module, which the first use of one imports.
_PUBLIC = {
    "api": [
        "agree", "explain", "install", "launch", "operator_rule", "status", "uninstall", "verify",
    ],
    "callback_api": ["ShardedCheckpoint", "StepStats"],
    "checkpoint_api": ["latest_checkpoint", "load_checkpoint", "save_checkpoint"],
    "engines_api": ["join_engines"],
    "files_api": ["load_dcp", "load_orbax", "load_safetensors", "save_dcp", "save_safetensors"],
    "plan_api": ["build", "estimate_memory", "plan", "rules_report"],
    "tensor_api": [
        "all_gather", "all_gather_variable", "all_reduce", "distribute_model", "distribute_tensor",
        "distribute_variable", "ensure_dtensor", "ensure_dtensor_input", "mesh_info",
        "parallelize_torch_module", "resize",
    ],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["Link", "ShardcoreError", *_MODULE_OF]  # noqa: PLE0604 - of strings


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'shardcore' has no attribute {name!r}")
    return getattr(import_module(f"shardcore.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
