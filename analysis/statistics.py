"""Ratios of medians with their intervals, how many samples a precision needs, and what makes samples unfit.

Every function returns `Missing` where the data cannot tell, with the reason; none fails open.

Sources:
    Efron, Tibshirani: An Introduction to the Bootstrap (1993), chapter 13: the percentile interval.
    Davison, Hinkley: Bootstrap Methods and their Application (1997), section 3.8: resampling in two stages where
        samples come in groups.
    Kendall: A new measure of rank correlation, Biometrika 30 (1938); Mann: Nonparametric tests against trend,
        Econometrica 13 (1945).
    Sen: Estimates of the regression coefficient based on Kendall's tau, JASA 63 (1968).
    Otsu: A threshold selection method from gray-level histograms, IEEE Trans. SMC 9 (1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from analysis.missing import Missing

Array = npt.NDArray[np.float64]
# One array a round, in the order of the run; a round is one fresh process a path.
Rounds = Sequence[Array]


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """How intervals are made; from the policy.

    Attributes:
        confidence: of the interval, such as 0.95.
        resamples: bootstrap samples.
        seed: of the generator: the same records give the same interval.
        least_samples: below this many (pairs of) samples there is no interval.
    """

    confidence: float
    resamples: int
    seed: int
    least_samples: int


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the interval that its samples allow.

    Attributes:
        value, low, high: in the figure's unit.
        samples, rounds: how many of each it rests on.
    """

    value: float
    low: float
    high: float
    samples: int
    rounds: int

    @property
    def half_width_share(self) -> float:
        """Half of the interval's width as a share of the value: its precision."""
        return (self.high - self.low) / 2 / self.value


def median_interval(rounds: Rounds, bootstrap: Bootstrap) -> Interval | Missing:
    """Return the median of all samples with its percentile interval."""
    doubt = _unfit(rounds, bootstrap.least_samples)
    if doubt:
        return doubt
    drawn = _draw([len(samples) for samples in rounds], bootstrap)
    samples = np.concatenate(rounds)
    return _interval(float(np.median(samples)), _medians(samples, drawn), rounds, bootstrap)


def paired_ratio(numerators: Rounds, denominators: Rounds, bootstrap: Bootstrap) -> Interval | Missing:
    """Return median over median of paired samples, with the paired percentile bootstrap interval.

    Sample i of round r of one side was measured next to sample i of round r of the other, so both are drawn
    together: what disturbs both sides alike cancels. Rounds are drawn first and pairs within them second, because
    samples of one process are more alike than samples of two.
    """
    if [len(samples) for samples in numerators] != [len(samples) for samples in denominators]:
        return Missing("the two sides have different samples: they cannot be paired")
    doubt = _unfit(numerators, bootstrap.least_samples) or _unfit(denominators, bootstrap.least_samples)
    if doubt:
        return doubt
    above, below = np.concatenate(numerators), np.concatenate(denominators)
    drawn = _draw([len(samples) for samples in numerators], bootstrap)
    ratios = _medians(above, drawn) / _medians(below, drawn)
    return _interval(float(np.median(above) / np.median(below)), ratios, numerators, bootstrap)


def independent_ratio(numerators: Rounds, denominators: Rounds, bootstrap: Bootstrap) -> Interval | Missing:
    """Return median over median of samples of two runs, each drawn on its own, with the percentile interval."""
    doubt = _unfit(numerators, bootstrap.least_samples) or _unfit(denominators, bootstrap.least_samples)
    if doubt:
        return doubt
    above, below = np.concatenate(numerators), np.concatenate(denominators)
    above_drawn = _draw([len(samples) for samples in numerators], bootstrap)
    # Another stream: with the same one, two runs of equal shape would be drawn alike, as if paired.
    below_drawn = _draw([len(samples) for samples in denominators], bootstrap, stream=1)
    ratios = _medians(above, above_drawn) / _medians(below, below_drawn)
    fewer = numerators if len(above) <= len(below) else denominators
    return _interval(float(np.median(above) / np.median(below)), ratios, fewer, bootstrap)


def samples_needed(interval: Interval, wanted_share: float) -> int:
    """Return how many samples would narrow the interval to `wanted_share` of the value on either side.

    An interval narrows with the square root of the samples. An estimate: from few samples, a rough one.
    """
    if interval.half_width_share <= wanted_share:
        return interval.samples
    # Rounded first: 80.00000000000001 samples are 80.
    return math.ceil(round(interval.samples * (interval.half_width_share / wanted_share) ** 2, 6))


def spread_share(samples: Array) -> float:
    """Return the distance between the quartiles as a share of the median."""
    low, middle, high = np.percentile(samples, [25, 50, 75])
    return float((high - low) / middle)


def kendall(samples: Array) -> tuple[float, float]:
    """Return Kendall's tau of the samples against their order, and its two-sided p by the normal approximation.

    Corrected for ties (tau-b), as the Mann-Kendall test for trend is.
    """
    count = len(samples)
    signs = np.sign(samples[None, :] - samples[:, None])[np.triu_indices(count, 1)]
    score = float(signs.sum())
    pairs = count * (count - 1) / 2
    _, ties = np.unique(samples, return_counts=True)
    untied = pairs - float((ties * (ties - 1) / 2).sum())
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if untied == 0 or variance <= 0:
        return 0.0, 1.0
    return score / math.sqrt(pairs * untied), math.erfc(abs(score) / math.sqrt(variance) / math.sqrt(2))


def drift_share(samples: Array) -> float:
    """Return Sen's slope times the length of the series, as a share of the median: what it gained from end to end."""
    first, second = np.triu_indices(len(samples), 1)
    slope = float(np.median((samples[second] - samples[first]) / (second - first)))
    return slope * (len(samples) - 1) / float(np.median(samples))


@dataclass(frozen=True, slots=True)
class Modes:
    """The best cut of samples into a lower and an upper group.

    Attributes:
        explained_share: of the variance, by the cut: 0.64 for a bell, 0.75 for a flat line, 1 for two points.
        smaller_share: of the samples, in the smaller group.
        low, high: the groups' means.
    """

    explained_share: float
    smaller_share: float
    low: float
    high: float


def modes(samples: Array) -> Modes:
    """Return Otsu's cut: the one that explains most of the variance."""
    ordered = np.sort(samples)
    count = len(ordered)
    variance = float(ordered.var())
    if variance == 0:
        return Modes(0.0, 0.0, float(ordered[0]), float(ordered[0]))
    below = np.arange(1, count)
    sums = np.cumsum(ordered)[:-1]
    low, high = sums / below, (ordered.sum() - sums) / (count - below)
    between = below / count * (1 - below / count) * (high - low) ** 2
    best = int(between.argmax())
    smaller = min(best + 1, count - best - 1) / count
    return Modes(float(between[best]) / variance, smaller, float(low[best]), float(high[best]))


def _unfit(rounds: Rounds, least_samples: int) -> Missing | None:
    samples = np.concatenate(rounds) if len(rounds) else np.empty(0)
    if any(len(each) == 0 for each in rounds):
        return Missing("a round has no sample")
    if not np.isfinite(samples).all():
        return Missing("a sample is no finite number")
    if (samples <= 0).any():
        return Missing("a sample is zero or negative: it has no ratio")
    if len(samples) < max(least_samples, 2):
        return Missing(f"{len(samples)} samples: an interval needs {max(least_samples, 2)}")
    return None


def _draw(lengths: Sequence[int], bootstrap: Bootstrap, stream: int = 0) -> npt.NDArray[np.int64]:
    """Return indices of drawn samples, one row a resample; -1 where a drawn round is shorter than the longest."""
    return _drawn(tuple(lengths), bootstrap, stream)


# Every case of a run has the same rounds, and the same seed draws the same from them.
@lru_cache(maxsize=4)
def _drawn(lengths: tuple[int, ...], bootstrap: Bootstrap, stream: int) -> npt.NDArray[np.int64]:
    # RandomState: its stream never changes (NEP 19), so committed reports stay byte for byte what they are.
    random = np.random.RandomState([bootstrap.seed, stream])
    starts = np.cumsum([0, *lengths[:-1]])
    length = np.asarray(lengths)
    chosen = random.randint(len(lengths), size=(bootstrap.resamples, len(lengths)))
    places = random.random_sample((*chosen.shape, max(lengths)))
    drawn = starts[chosen][:, :, None] + (places * length[chosen][:, :, None]).astype(np.int64)
    surplus = np.arange(max(lengths)) >= length[chosen][:, :, None]
    indices: npt.NDArray[np.int64] = np.where(surplus, -1, drawn).reshape(bootstrap.resamples, -1)
    indices.flags.writeable = False  # it is shared
    return indices


def _medians(samples: Array, drawn: npt.NDArray[np.int64]) -> Array:
    if (drawn >= 0).all():
        return np.asarray(np.median(samples[drawn], axis=1), dtype=np.float64)
    return np.asarray(np.nanmedian(np.where(drawn >= 0, samples[drawn], np.nan), axis=1), dtype=np.float64)


def _interval(value: float, resampled: Array, rounds: Rounds, bootstrap: Bootstrap) -> Interval:
    tail = (1 - bootstrap.confidence) / 2 * 100
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(value, float(low), float(high), sum(len(samples) for samples in rounds), len(rounds))
