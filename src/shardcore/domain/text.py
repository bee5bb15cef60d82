"""The one function that cleans what a person sees and shardcore did not write.

Names of folders, variables and layouts may come from a file of a stranger. A terminal obeys the
escape sequences in them, and shows text in another order than it is written in.
"""

_KEPT = "\n\t"
_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    r"""Returns `text` with a mark for each character that is none to be read.

    Lines and tabs stay. Control characters, marks of direction and half characters do not.

    Example:
        >>> printable("kernel\x1b[2J\n") == "kernel\ufffd[2J\n"
        True
    """
    if text.isprintable():
        return text
    return "".join(char if char in _KEPT or char.isprintable() else _REPLACEMENT for char in text)
