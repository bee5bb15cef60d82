"""The self-check of `install()`, for releases of Keras and torch newer than the tested (ADR 30)."""

import importlib.util
import pkgutil
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardcore.builtin_plugins import why_no_distributed, why_no_dtensor
from shardcore.domain.errors import EnvironmentProblem

# The file has, by kind and name, where each private name of torch is.
_NAMES = files("shardcore") / "adapters" / "torch_private" / "private_names.toml"
Kinds = Mapping[str, Mapping[str, Mapping[str, Any]]]


def check(newer: Iterable[str]) -> None:
    """Raises an EnvironmentProblem if something of Keras or torch does not fit; changes nothing.

    Args:
        newer: Sentences about the packages that are newer than the tested ones.
    """
    misfits = problems()
    if misfits:
        raise EnvironmentProblem(
            f"{' '.join(newer)} The self-check found what does not fit: {'; '.join(misfits)}. "
            "Nothing was changed. Install a tested release, or look for a newer shardcore."
        )


def problems() -> list[str]:
    """Lists what of Keras and torch does not fit, by name."""
    kinds = tomllib.loads(_NAMES.read_text())
    lost = [f"torch has no {name}" for name in missing(kinds, set(_left_out()))]
    # Without its private names, the adapters of torch cannot be imported.
    return [*lost, *_keras_problems(), *([] if lost else _operator_problems())]


def missing(kinds: Kinds, left_out: Collection[str] = ()) -> Iterator[str]:
    """Yields the private names that this torch does not have.

    Args:
        kinds: The names by kind, as in the file.
        left_out: The parts that this build of torch lacks.
    """
    for kind, entries in kinds.items():
        for name, entry in entries.items():
            if entry.get("part") not in left_out:
                for holder, last in _holders(kind, name, entry.get("of", ())):
                    if not has(holder, last):
                        yield f"{holder}.{last}"


def _holders(kind: str, name: str, of: Iterable[str]) -> list[tuple[str, str]]:
    if kind == "operator":
        name = f"torch.ops.{name.replace('::', '.')}"
    holders = of or (name.rpartition(".")[0],)
    return [(holder, name.rpartition(".")[2]) for holder in holders]


def has(holder: str, name: str) -> bool:
    """Looks for `name` in the module, class or object `holder`.

    A private module that is not loaded is read as text: to import Inductor takes seconds.
    """
    try:
        if holder.startswith("torch._") and holder not in sys.modules:
            spec = importlib.util.find_spec(holder)
            source = Path(spec.origin).read_text() if spec and spec.origin else ""
            line = rf"^\s*(class |def |from .* import .*)?\b{name}\b"
            is_there = re.search(line, source, re.MULTILINE) is not None
        else:
            owner = pkgutil.resolve_name(holder)
            is_there = hasattr(owner, name) or name in getattr(owner, "__annotations__", ())
        return is_there or importlib.util.find_spec(f"{holder}.{name}") is not None
    except (ImportError, AttributeError):
        return False


def _left_out() -> Iterator[str]:
    """Yields the parts that this build of torch lacks; strategies say so."""
    if why_no_dtensor() is not None:
        yield "torch.distributed.tensor"
    if why_no_distributed() is not None:
        yield "torch.distributed"
    if not pkgutil.resolve_name("torch.backends.mkldnn:is_available")():
        yield "torch.backends.mkldnn"


def _keras_problems() -> list[str]:
    try:
        from shardcore.binding import install as install  # imports all that it patches
        from shardcore.binding import patch_table
    except (ImportError, AttributeError) as error:
        return [f"Keras: {error}"]
    return [f"Keras has no {name}" for name in patch_table.missing()]


def _operator_problems() -> list[str]:
    from shardcore.adapters.engine.self_check import wrong_operators

    return list(wrong_operators())
