"""A step recorded as a tape of operators on plain tensors, and run from it.

Import `program.TapeCapture`, the port; `recorder.recording` and `places.place` say what runs now.
"""
