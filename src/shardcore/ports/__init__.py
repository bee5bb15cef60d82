"""Protocols that adapters and plug-ins implement, and the types that cross them."""
