"""What makes samples unfit to stand for each other: spread, drift, two modes, a first sample apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.policy import Instability as Limits
from analysis.rounds import by_round
from analysis.statistics import Array, drift_share, kendall, modes, spread_share
from analysis.units import text

# Fewer samples than this show no pattern that chance would not.
LEAST_SAMPLES = 8
_CHECK = "python -m benchmarks check"


@dataclass(frozen=True, slots=True)
class Instability:
    """One doubt about the steady samples of a path.

    Attributes:
        kind: "spread", "drift", "two modes" or "first sample".
        path: whose samples.
        found_share, limit_share: of the median, or of the variance for two modes.
        words: what it means, and what to do next.
    """

    kind: str
    path: str
    found_share: float
    limit_share: float
    words: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind} {self.found_share:.0%}, limit {self.limit_share:.0%}: {self.words}"


def instabilities(path: str, steady: pd.Series[float], limits: Limits) -> list[Instability]:
    """Return what is wrong with steady samples, indexed by (round, save).

    Too few samples show nothing, and neither does a sample that is no positive number: the decision asks for a number
    of samples of its own, and refuses the others.
    """
    samples: Array = np.asarray(steady.sort_index(), dtype=np.float64)
    if len(samples) < LEAST_SAMPLES or not (np.isfinite(samples) & (samples > 0)).all():
        return []
    found = []

    spread = spread_share(samples)
    if spread > limits.spread_share_at_most:
        words = f"the interval is wide for it; a quieter machine helps more than repeats ({_CHECK})"
        found.append(Instability("spread", path, spread, limits.spread_share_at_most, words))

    drift, (_, chance) = drift_share(samples), kendall(samples)
    if abs(drift) > limits.drift_share_at_most and chance < limits.drift_p_below:
        way = "slower" if drift > 0 else "faster"
        words = f"{way} towards the end (p = {chance:.2g}); heat, a filling disk, or a neighbour ({_CHECK})"
        found.append(Instability("drift", path, abs(drift), limits.drift_share_at_most, words))

    cut = modes(samples)
    apart = (cut.high - cut.low) / float(np.median(samples))
    if (
        cut.explained_share > limits.modes_explained_at_most
        and cut.smaller_share >= limits.modes_smaller_share_at_least
        and apart > limits.modes_gap_share_at_least
    ):
        ends = f"{text(cut.low, 'seconds')} and {text(cut.high, 'seconds')}"
        words = f"{cut.smaller_share:.0%} of the samples lie apart, around {ends}; more rounds show the rule (--rounds)"
        found.append(Instability("two modes", path, cut.explained_share, limits.modes_explained_at_most, words))

    first = _first_apart(steady)
    if first is not None and abs(first) > limits.first_share_at_most:
        words = "the first steady save of a process is unlike its others: the warm-up was too short"
        found.append(Instability("first sample", path, abs(first), limits.first_share_at_most, words))
    return found


def _first_apart(steady: pd.Series[float]) -> float | None:
    """Return how far the first steady save of a process lies from the median of its others: the median of rounds."""
    shares = [
        float(samples[0] / np.median(samples[1:])) - 1 for samples in by_round(steady).values() if len(samples) >= 3
    ]
    return float(np.median(shares)) if len(shares) >= 3 else None
