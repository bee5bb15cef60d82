"""The engine: runs every operator on sharded tensors, for every strategy.

`tensor` has the sharded tensors, `dispatch` looks an operator up, `plan` runs it by the plan of
`domain.engine.choice`, `redistribution` moves tensors. Import `library`, the port for strategies.
"""
