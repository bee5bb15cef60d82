"""The engine: runs every operator on sharded tensors, for every strategy.

`tensor` says what a sharded tensor is, `dispatch` looks an operator up, `planned` runs it as the
core's planner says, `redistribute` moves a tensor to another layout, and `library` is the port that
a strategy is written against.
"""
