"""Choice of the split of an operator over a mesh: import `choice.choose` and `call.Placed`."""
