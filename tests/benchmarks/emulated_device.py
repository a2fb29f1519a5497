"""Imported by a worker (`--import`): the emulated accelerator, with the cost that the environment asks for."""

from __future__ import annotations

import os

from tests import emulated

emulated.install()
_cost = emulated.cost(
    float(os.environ.get("EMULATED_CALL_SECONDS", "0")), float(os.environ.get("EMULATED_BYTE_SECONDS", "0"))
)
_cost.__enter__()  # for the life of the process
