"""Statistics against published examples, against scipy, and against what they must refuse."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.missing import Missing
from analysis.statistics import (
    Bootstrap,
    Interval,
    _draw,
    _medians,
    drift_share,
    independent_ratio,
    kendall,
    median_interval,
    modes,
    paired_ratio,
    samples_needed,
    spread_share,
)

BOOTSTRAP = Bootstrap(confidence=0.95, resamples=4000, seed=1, least_samples=5)
# Efron and Tibshirani, table 2.1: survival of seven treated mice, in days.
MICE = np.array([94.0, 197.0, 16.0, 38.0, 99.0, 141.0, 23.0])


def interval_of(found: Interval | Missing) -> Interval:
    assert isinstance(found, Interval), found
    return found


def test_standard_error_of_the_mice_median() -> None:
    """Efron and Tibshirani, table 2.1: 37.83 for infinitely many bootstrap samples; 36.72 for 1000."""
    drawn = _draw([len(MICE)], Bootstrap(0.95, 40_000, 1, 5))
    assert np.std(_medians(MICE, drawn)) == pytest.approx(37.83, rel=0.02)


def test_distribution_of_the_mice_median() -> None:
    """The median of 7 of 7 is the k-th smallest with the probability that the binomial distribution gives."""
    ordered = np.sort(MICE)
    medians = _medians(MICE, _draw([7], Bootstrap(0.95, 40_000, 1, 5)))

    def at_most(k: int) -> float:
        share = k / 7
        return sum(math.comb(7, n) * share**n * (1 - share) ** (7 - n) for n in range(4, 8))

    for k in range(1, 8):
        assert float((medians == ordered[k - 1]).mean()) == pytest.approx(at_most(k) - at_most(k - 1), abs=0.01)


def test_paired_ratio_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(5)
    below = random.lognormal(0, 0.2, 30)
    above = 0.7 * below * random.lognormal(0, 0.05, 30)
    ours = interval_of(paired_ratio([above], [below], Bootstrap(0.95, 20_000, 1, 5)))
    theirs = stats.bootstrap(
        (above, below),
        lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert ours.value == np.median(above) / np.median(below)
    assert ours.low == pytest.approx(theirs.low, rel=0.005)
    assert ours.high == pytest.approx(theirs.high, rel=0.005)


def test_independent_ratio_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(6)
    above, below = random.lognormal(0.1, 0.2, 120), random.lognormal(0, 0.2, 120)
    ours = interval_of(independent_ratio([above], [below], Bootstrap(0.95, 20_000, 1, 5)))
    theirs = stats.bootstrap(
        (above, below),
        lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis),
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert ours.low == pytest.approx(theirs.low, rel=0.01)
    assert ours.high == pytest.approx(theirs.high, rel=0.01)


def test_pairing_cancels_what_both_sides_share() -> None:
    random = np.random.default_rng(7)
    shared = random.lognormal(0, 0.5, 24)
    paired = interval_of(paired_ratio([0.8 * shared], [shared], BOOTSTRAP))
    apart = interval_of(independent_ratio([0.8 * shared], [shared], BOOTSTRAP))
    assert (paired.low, paired.high) == pytest.approx((0.8, 0.8))
    assert apart.high - apart.low > 0.2


def test_rounds_that_differ_widen_the_interval() -> None:
    """Twenty samples of five processes are not twenty processes."""
    random = np.random.default_rng(8)
    rounds = [level * random.normal(1, 0.01, 4) for level in (0.8, 0.9, 1.0, 1.1, 1.2)]
    flat = interval_of(median_interval([np.concatenate(rounds)], BOOTSTRAP))
    grouped = interval_of(median_interval(rounds, BOOTSTRAP))
    assert grouped.high - grouped.low > 1.4 * (flat.high - flat.low)


def test_rounds_of_different_lengths() -> None:
    found = interval_of(median_interval([np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.5])], BOOTSTRAP))
    assert (found.value, found.samples, found.rounds) == (2.0, 5, 2)
    assert 1.0 <= found.low <= found.value <= found.high <= 3.0


def test_the_same_samples_give_the_same_interval() -> None:
    assert median_interval([MICE], BOOTSTRAP) == median_interval([MICE], BOOTSTRAP)


# Taken once and kept: a change of numpy or of the drawing would change committed reports.
def test_the_interval_is_pinned() -> None:
    found = interval_of(median_interval([MICE], BOOTSTRAP))
    assert (found.value, found.low, found.high) == (94.0, 23.0, 141.0)


@pytest.mark.parametrize(
    ("above", "below", "why"),
    [
        ([], [], "no sample"),
        ([1.0] * 4, [1.0] * 4, "4 samples"),
        ([1.0] * 6, [0.0] * 6, "zero or negative"),
        ([1.0] * 6, [1.0] * 5 + [-1.0], "zero or negative"),
        ([math.nan] + [1.0] * 5, [1.0] * 6, "no finite number"),
        ([1.0] * 6, [math.inf] + [1.0] * 5, "no finite number"),
        ([1.0] * 6, [1.0] * 5, "cannot be paired"),
    ],
)
def test_what_cannot_be_told(above: list[float], below: list[float], why: str) -> None:
    found = paired_ratio([np.array(above)], [np.array(below)], BOOTSTRAP)
    assert isinstance(found, Missing)
    assert why in found.reason


def test_no_rounds_and_an_empty_round_cannot_be_told() -> None:
    assert isinstance(paired_ratio([], [], BOOTSTRAP), Missing)
    assert isinstance(median_interval([MICE, np.empty(0)], BOOTSTRAP), Missing)


@given(
    st.lists(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=6), min_size=1, max_size=5),
    st.floats(0.01, 100),
)
def test_a_constant_ratio_is_found_exactly(rounds: list[list[float]], ratio: float) -> None:
    below = [np.array(some) for some in rounds]
    found = paired_ratio([ratio * some for some in below], below, Bootstrap(0.95, 50, 1, 2))
    if isinstance(found, Missing):
        assert sum(map(len, rounds)) < 2
    else:
        assert (found.low, found.high) == pytest.approx((ratio, ratio))


def test_samples_needed_by_the_square_of_the_precision() -> None:
    """NIST/SEMATECH e-Handbook, 7.2.2.2: n grows with (z s / d) squared; half the width takes four times as many."""
    found = Interval(value=1.0, low=0.9, high=1.1, samples=20, rounds=5)
    assert samples_needed(found, 0.05) == 80
    assert samples_needed(found, 0.1) == 20
    assert samples_needed(found, 0.5) == 20
    random = np.random.default_rng(9)
    few = interval_of(median_interval([random.normal(1, 0.2, 40)], BOOTSTRAP))
    needed = samples_needed(few, 0.03)
    many = interval_of(median_interval([random.normal(1, 0.2, needed)], BOOTSTRAP))
    assert many.half_width_share == pytest.approx(0.03, rel=0.35)


def test_kendall_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(10)
    for slope, rounded in product((0.0, 0.05, -0.2), (False, True)):
        samples = random.normal(0, 1, 40) + slope * np.arange(40)
        samples = np.asarray(np.round(samples) if rounded else samples, dtype=np.float64)
        tau, chance = kendall(samples)
        theirs = stats.kendalltau(np.arange(40), samples, method="asymptotic")
        assert tau == pytest.approx(theirs.statistic, abs=1e-12)
        assert chance == pytest.approx(theirs.pvalue, abs=1e-12)


def test_kendall_counted_by_hand() -> None:
    """Of 45 pairs, 25 are in order and 20 are not."""
    tau, _ = kendall(np.array([4.0, 7.0, 2.0, 10.0, 3.0, 6.0, 8.0, 1.0, 5.0, 9.0]))
    assert tau == pytest.approx((25 - 20) / 45)
    assert kendall(np.ones(6)) == (0.0, 1.0)


def test_drift_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    samples = np.random.default_rng(11).normal(10, 0.1, 30) + 0.1 * np.arange(30)
    slope = stats.theilslopes(samples).slope
    assert drift_share(samples) == pytest.approx(slope * 29 / np.median(samples))


def test_modes_of_known_shapes() -> None:
    random = np.random.default_rng(12)
    assert modes(random.normal(0, 1, 20_000)).explained_share == pytest.approx(2 / math.pi, abs=0.01)
    assert modes(random.uniform(0, 1, 20_000)).explained_share == pytest.approx(0.75, abs=0.01)
    two = modes(np.concatenate([random.normal(1, 0.02, 15), random.normal(1.5, 0.02, 5)]))
    assert two.explained_share > 0.95
    assert two.smaller_share == 0.25
    assert (two.low, two.high) == pytest.approx((1.0, 1.5), abs=0.03)
    assert modes(np.ones(5)).explained_share == 0.0


def test_spread() -> None:
    assert spread_share(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == pytest.approx(2 / 3)
