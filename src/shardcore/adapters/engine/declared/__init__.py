"""The operators of users and plug-ins, for which they declare sharding rules."""
