"""The keys of a store that are there and that are not, and the values, by few requests."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a torch without torch.distributed has no stores
    from torch.distributed.distributed_c10d import Store


def absent(store: "Store", keys: Sequence[str]) -> Iterator[int]:
    """Yields the positions of the keys that have no value, by requests for halves of the keys.

    Example:
        >>> from torch.distributed import HashStore
        >>> store = HashStore()
        >>> store.set("a", "")
        >>> list(absent(store, ["a", "b", "c"]))
        [1, 2]
    """
    yield from _absent(store, keys, range(len(keys)))


def values(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Returns the values of `keys`, which exist: in one request, where the store can do that."""
    extended = store.has_extended_api()  # the stubs of torch lack it
    return store.multi_get(keys) if extended else [store.get(key) for key in keys]


def _absent(store: "Store", keys: Sequence[str], part: range) -> Iterator[int]:
    if store.check([keys[number] for number in part]):
        return
    if len(part) == 1:
        yield from part
        return
    half = len(part) // 2
    yield from _absent(store, keys, part[:half])
    yield from _absent(store, keys, part[half:])
