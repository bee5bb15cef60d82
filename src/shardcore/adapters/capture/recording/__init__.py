"""Records a step as a trace while it runs.

Import `recorder.Recorder`; `recorder.recording` and `recorder.source_line` say what runs now.
"""
