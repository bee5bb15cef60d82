"""Real text that needs no download: the language documentation that Python ships with."""

from pydoc_data.topics import topics

import numpy as np


def windows(count, length):
    """`count` windows of bytes, and for each byte the one that follows it."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    data = np.frombuffer(text.encode(), np.uint8)[: count * length + 1].astype("int32")
    return data[:-1].reshape(count, length), data[1:].reshape(count, length)
