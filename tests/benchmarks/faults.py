"""Imported by a worker (`--import`): kills the worker whose order the environment names."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

if os.environ.get("FAULT_PATH"):
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["task"]
    if (task["path"], task["passes"][0]) == (os.environ["FAULT_PATH"], os.environ["FAULT_PASS"]):
        os.kill(os.getpid(), signal.SIGKILL)
