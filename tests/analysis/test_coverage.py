"""How often the interval holds the true ratio, on simulated runs. Seeded: a change of the method shows as a number.

A percentile interval of nominal 95 % may be a little short or long; what must not be is one that leaves the truth out
much more often than it says.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from analysis.missing import Missing
from analysis.statistics import Array, Bootstrap, paired_ratio

RUNS = 300
RATIO = 0.8
ROUNDS, SAVES = 5, 4  # what the policy asks for at least
BOOTSTRAP = Bootstrap(confidence=0.95, resamples=400, seed=3, least_samples=5)

Sides = tuple[list[Array], list[Array]]


def bell(random: np.random.Generator) -> Sides:
    """Noise of a quiet machine."""
    return _rounds(lambda: random.normal(1, 0.05, SAVES), lambda _: (1.0, 1.0))


def skewed(random: np.random.Generator) -> Sides:
    """A long tail to the slow side, as latencies have."""
    return _rounds(lambda: 1 + random.exponential(0.2, SAVES), lambda _: (1.0, 1.0))


def drifting(random: np.random.Generator) -> Sides:
    """The machine becomes a third slower from the first round to the last; both sides alike."""
    return _rounds(lambda: random.normal(1, 0.05, SAVES), lambda n: (1 + 0.33 * n / (ROUNDS - 1),) * 2)


def bistable(random: np.random.Generator) -> Sides:
    """Each process has a state of its own, which its saves share."""
    return _rounds(
        lambda: random.normal(1, 0.02, SAVES), lambda _: (random.lognormal(0, 0.08), random.lognormal(0, 0.08))
    )


def _rounds(noise: Callable[[], Array], levels: Callable[[int], tuple[float, ...]]) -> Sides:
    above, below = [], []
    for number in range(ROUNDS):
        mine, theirs = levels(number)
        above.append(RATIO * mine * noise())
        below.append(theirs * noise())
    return above, below


@pytest.mark.parametrize(
    ("simulate", "at_least"),
    [(bell, 0.95), (skewed, 0.95), (drifting, 0.95), (bistable, 0.90)],
)
def test_coverage(simulate: Callable[[np.random.Generator], Sides], at_least: float) -> None:
    random = np.random.default_rng(20)
    held = 0
    for _ in range(RUNS):
        above, below = simulate(random)
        found = paired_ratio(above, below, BOOTSTRAP)
        assert not isinstance(found, Missing)
        held += found.low <= RATIO <= found.high
    assert held / RUNS >= at_least, held / RUNS


def test_a_against_a_holds_one() -> None:
    """No difference: "faster" must be rare, or one of many cases would be adopted by chance."""
    random = np.random.default_rng(21)
    wholly_below = 0
    for _ in range(RUNS):
        above, below = bistable(random)
        found = paired_ratio([some / RATIO for some in above], below, BOOTSTRAP)
        assert not isinstance(found, Missing)
        wholly_below += found.high < 0.95
    assert wholly_below / RUNS <= 0.025, wholly_below / RUNS
