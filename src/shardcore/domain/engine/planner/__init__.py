"""Choice of the sharding of an operator over a mesh.

Import `choice.choose` and `call.PlacedTensor`.
"""
