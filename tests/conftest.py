"""Settings for every test: quiet TensorFlow on the CPU, deterministic property tests."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from hypothesis import settings

settings.register_profile("tfpipe", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("tfpipe")
