"""Steps as data: the events of a traced one, on any mesh, its cost, the states of a captured one.

Import `events.TracedStep`, `larger_mesh.step_on`, `cost.cost_of` and, from `capture`, the states.
"""
