"""How each operator can be split: sharding rules, which know no library."""
