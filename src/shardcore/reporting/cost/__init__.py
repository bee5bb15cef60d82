"""The reports on machines, memory, plans and the choice of policy `auto`."""
