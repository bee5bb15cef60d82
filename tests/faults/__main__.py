"""Tries faults in parts, prints what held, and writes docs/reference/faults.md.

python -m tests.faults
python -m tests.faults --part saves --part kills --save-kills 3
"""

import argparse
import os
import sys

os.environ |= {"KERAS_BACKEND": "torch"}
# A few lines for each of many thousand saves and loads would hide the table.
os.environ.setdefault("SHARDCORE_LOG", "error")

import attrs  # after the environment that Keras reads
from absl import logging

from tests.faults import page, parts


def main() -> int:
    """Returns 1 if a kind did not hold."""
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=parts.PARTS, action="append", help="else all of them")
    for field in attrs.fields(parts.Amounts):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    chosen = given.pop("part") or list(parts.PARTS)
    logging.set_verbosity(logging.ERROR)
    found = parts.run(chosen, parts.Amounts(**given))
    print("\n".join(page.table(found)))
    return 0 if page.has_held(found, chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
