"""What to type to measure what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable

from analysis.policy import Policy


def run_command(policy: Policy, presets: Iterable[str], pairs: int = 0) -> str:
    """Return the command that measures presets as the policy asks for it.

    Args:
        pairs: of steady saves, where more are needed than the policy's own number.
    """
    rounds = policy.repeats.rounds_at_least
    repeats = math.ceil(max(pairs, policy.repeats.pairs_at_least) / rounds)
    words = ["python -m benchmarks run"]
    words += [f"--preset {preset}" for preset in dict.fromkeys(presets)]
    words += [f"--path {path}" for path in (policy.paths.baseline, policy.paths.candidate)]
    words += [f"--ranks {ranks}" for ranks in policy.hardware.ranks]
    words += [f"--device {policy.hardware.device_kind}", f"--rounds {rounds}", f"--repeats {repeats}"]
    return " ".join(words)
