"""Shows the `Example:` sections of docstrings as code: griffe knows `Examples:` only."""

import re
from typing import Any

import griffe


class ExamplesSection(griffe.Extension):
    """Renames the sections while the sources are loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section in the docstring of `obj`, if it has one."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
