"""The table of patches, read from the functions that declare them (ADR 2)."""

from collections.abc import Iterable
from types import ModuleType

from shardcore.binding import backend_library, keras_private, metric_sums, torch_modules
from shardcore.binding import layouts as layout_map
from shardcore.binding.capture import generation, slices
from shardcore.binding.checkpoints import backup
from shardcore.binding.checkpoints.files import callbacks, exports, loading, saving
from shardcore.binding.cost import plan
from shardcore.binding.data import batches, data_adapters
from shardcore.binding.engine import adoption, large_values, operations, variable
from shardcore.binding.inspection import explained_step
from shardcore.binding.keras_private import patches, shapes
from shardcore.binding.keras_private.patches import Replacement, declared_in
from shardcore.binding.ranks import ambient
from shardcore.binding.training import calls, ends, loops, optimizers, steps


def _declared_in(modules: Iterable[ModuleType]) -> tuple[Replacement, ...]:
    return tuple(replacement for module in modules for replacement in declared_in(module))


# What install() replaces, in all lines of Keras.
INSTALLED = _declared_in(
    (
        *(backend_library, layout_map, metric_sums),
        ambient,
        *(adoption, large_values, variable),
        *(calls, operations, slices, generation),
        torch_modules,
        *(batches, data_adapters),
        *(ends, loops, optimizers, steps),
        *(callbacks, exports, loading, saving),
        backup,
    )
)
# What is replaced in a context only: while a model is built for a plan, or explained.
TEMPORARY = _declared_in((patches, shapes, plan, explained_step))
# The patches that the installed release of Keras needs, by their keys.
PATCHES = {
    replacement.patch.key: replacement.patch
    for replacement in INSTALLED
    if replacement.patch.is_needed
}


def missing() -> list[str]:
    """Lists the names in the table that this Keras does not have."""
    temporary = (replacement.patch for replacement in TEMPORARY)
    needed = (patch for patch in temporary if patch.is_needed)
    return keras_private.missing([*PATCHES.values(), *needed])
