"""What a subclass of DTensor needs that has no public name.

torch 2.13: a DTensor says its layout by a `DTensorSpec`, whose class is private, as is that of the
shape, strides and dtype in it. A DTensor keeps both, and its local shard, in attributes that are
private (`_spec`, `_local_tensor`); a subclass gives them as properties.
"""

from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

__all__ = ["DTensorSpec", "TensorMeta"]
