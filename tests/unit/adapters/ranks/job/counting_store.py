"""A store that counts requests, for tests of what grows with the number of ranks."""

from collections import Counter


class CountingStore:
    """A store that counts the requests of one rank, and the bytes that these read."""

    def __init__(self, store):
        self.store = store
        self.requests, self.bytes = Counter(), 0

    def __getattr__(self, name):
        def ask(*args):
            found = getattr(self.store, name)(*args)
            if name != "has_extended_api":  # which asks nothing
                self.requests[name] += 1
            read = found if isinstance(found, list) else [found]
            self.bytes += sum(len(each) for each in read if isinstance(each, bytes))
            return found

        return ask
