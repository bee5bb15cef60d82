"""How torch does what the ports ask for. Private torch names stand in `torch_compat`."""
