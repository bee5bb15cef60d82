"""The torch code behind the ports. `api`, `bootstrap` and `builtin_plugins` import it."""
