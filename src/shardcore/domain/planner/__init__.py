"""How an operator is split over a mesh, given its sharding rule and its operands."""
