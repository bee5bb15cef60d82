"""Records a step as a trace while it runs.

Import `recorder.Recorder`; `recorder.recording` and `places.place` say what runs now.
"""
