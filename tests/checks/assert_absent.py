"""Fails when one of the named modules can be imported: `python assert_absent.py torch keras`."""

import importlib.util
import sys

found = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None]
if found:
    sys.exit(f"{sys.executable} must not have {', '.join(found)}: this environment is the core's.")
