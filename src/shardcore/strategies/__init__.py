"""How a distributed variable lives. Written against ports; strategies do not know each other."""
