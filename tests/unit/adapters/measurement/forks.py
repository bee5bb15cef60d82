"""Runs backward passes without values in forked processes.

Such a pass starts threads of autograd. A process that is forked after it, as in other tests, could
run no backward pass.
"""

import functools

from shardcore.adapters.job import forked_ranks


def forked(function):
    """Runs a function in a forked process, and returns its result or raises its error."""

    @functools.wraps(function)
    def run(*args):
        case = forked_ranks.Case(lambda _: function(*args), (), timeout=60, init=False)
        return forked_ranks.run(case, 1)[0]

    return run
