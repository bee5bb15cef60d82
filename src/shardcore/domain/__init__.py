"""Layouts, operators, steps, ranks and checkpoints as pure data, a folder for each subject."""
