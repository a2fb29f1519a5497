"""Settings that every test shares."""

from __future__ import annotations

import os
import signal

import torch
from hypothesis import HealthCheck, settings

# The tensors are tiny: threads that wait for one another cost more than they give, above all on a busy machine.
torch.set_num_threads(1)

# A shell that starts something in the background has it ignore Ctrl-C, and Python then leaves it at that; some tests
# send one.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Deadlines measure the machine. In CI the examples are the same on every run, so that a red check can be repeated.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("here", **_COMMON)
settings.register_profile("ci", derandomize=True, database=None, **_COMMON)
settings.load_profile("ci" if os.environ.get("CI") else "here")
