"""Settings that every test shares."""

import os

from hypothesis import settings

# Before anybody imports Keras: the backend that this project is about.
os.environ["KERAS_BACKEND"] = "torch"

# A loaded machine is no reason to fail: hypothesis measures no time here.
settings.register_profile("shardcore", deadline=None)
settings.load_profile("shardcore")
