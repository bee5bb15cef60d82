"""Choice of the sharding of an operator over a mesh: import `choice.choose` and `call.Placed`."""
