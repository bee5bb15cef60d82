"""Records a step as a trace while it runs.

Import `recorder.Recorder`; `recorder.recording` says which one records now.
"""
