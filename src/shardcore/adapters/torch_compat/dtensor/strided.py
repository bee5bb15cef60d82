"""What a `_StridedShard` stands for: an order of mesh axes, or what a view has left of a split."""

from torch.distributed.tensor._dtensor_spec import DTensorSpec


def tell_views(*specs: DTensorSpec) -> None:
    """Say of each spec whose `_StridedShard`s are no order of axes that a view has left them.

    torch 2.13: a spec that is made of placements takes them for an order, and only the rules of
    views say otherwise. What is no order is then redistributed axis by axis, which gives other
    values where two axes split one dim and one of them is gathered:
    `k.reshape(4, 8).redistribute([Replicate(), _StridedShard(1, 2)])` for a `k` of shape (4, 2, 4)
    in `[Shard(2), Shard(2)]`.
    """
    for spec in specs:
        if is_no_order(spec):
            spec.use_strided_shard_as_shard_order = False
            spec.shard_order = spec.compute_default_shard_order(spec.placements)


def is_no_order(spec: DTensorSpec) -> bool:
    """Whether `spec` says that its `_StridedShard`s are an order of axes, and they are none."""
    return bool(
        spec.use_strided_shard_as_shard_order
        and spec._maybe_convert_StridedShard_to_shard_order(spec.placements, spec.mesh) is None
    )
