"""The trace of a step: its calls and values, what is known of them, and how they are replaced.

It imports no other folder of `capture`.
"""
