"""Adopt, hold, or not enough data: policy.toml applied to evidence. Whatever is not shown is not adopted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from analysis.believe import doubts
from analysis.commands import run_command
from analysis.evidence import CaseEvidence, Disagreement, PathEvidence, collect, digest_disagreement
from analysis.instability import instabilities
from analysis.load import Run
from analysis.missing import Missing
from analysis.policy import Policy
from analysis.statistics import Interval, paired_ratio, samples_needed
from analysis.units import text

Kind = Literal["mismatch", "unfit", "hold", "missing"]


class Outcome(StrEnum):
    """The three answers."""

    ADOPT = "adopt"
    HOLD = "hold"
    NOT_ENOUGH = "not enough data"


EXIT_CODES = {Outcome.ADOPT: 0, Outcome.HOLD: 3, Outcome.NOT_ENOUGH: 4}
MISMATCH_EXIT_CODE = 5
# Of one run: whoever has to mend a file needs the first few, and the number.
MOST_FAULTS = 5


@dataclass(frozen=True, slots=True)
class Reason:
    """Why it is not adopted.

    Attributes:
        kind: "mismatch": the checkpoints or transfers are not what they must be. "unfit": what was measured can say
            neither yes nor no: another machine, too few repeats, a figure that cannot be. "hold": a figure says no.
            "missing": a figure is not there.
        figure: which one, as a record names it.
        words: what was found, and what was expected.
        command: what to type to find out, or None.
        where: which case, or nothing where it is the run or the whole.
    """

    kind: Kind
    figure: str
    words: str
    command: str | None = None
    where: str = ""

    def __str__(self) -> str:
        return f"{self.figure}: {self.words}"


@dataclass(frozen=True, slots=True)
class CaseDecision:
    """The decision about one case at one world size.

    Attributes:
        scope: preset and method that it counts for.
        family_votes: whether cases of its kind vote.
        votes: whether its time and memory count; a mismatch always does.
        fits_hardware: whether it was measured on what the policy asks for.
    """

    run_id: str
    title: str
    scope: str
    world_size: int
    family_votes: bool
    votes: bool
    fits_hardware: bool
    ratio: Interval | Missing
    reasons: tuple[Reason, ...]

    @property
    def outcome(self) -> Outcome:
        """The answer for this case."""
        return outcome_of(self.reasons)


@dataclass(frozen=True, slots=True)
class ScopeDecision:
    """The decision about a preset and method: the worst of its voting cases.

    Attributes:
        reasons: of its own: what no case stands for.
    """

    scope: str
    cases: tuple[CaseDecision, ...]
    reasons: tuple[Reason, ...]

    @property
    def all_reasons(self) -> tuple[Reason, ...]:
        """Its own and those of its cases."""
        return tuple(dict.fromkeys((*self.reasons, *(reason for case in self.cases for reason in counting(case)))))

    @property
    def outcome(self) -> Outcome:
        """The answer for this scope."""
        return outcome_of(self.all_reasons)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a path: the worst of its scopes.

    Attributes:
        path, baseline: what was judged against what.
        policy_digest: by which policy.
        run_ids: from which runs.
        scopes: for each preset and method.
        others: cases that do not vote, for what they show.
        reasons: of its own, such as a file that cannot be read.
    """

    path: str
    baseline: str
    policy_digest: str
    run_ids: tuple[str, ...]
    scopes: tuple[ScopeDecision, ...]
    others: tuple[CaseDecision, ...]
    reasons: tuple[Reason, ...]

    @property
    def all_reasons(self) -> tuple[Reason, ...]:
        """Every reason that counts, each once."""
        parts = (self.reasons, *(scope.all_reasons for scope in self.scopes), *(counting(case) for case in self.others))
        return tuple(dict.fromkeys(reason for part in parts for reason in part))

    @property
    def outcome(self) -> Outcome:
        """The answer. Nothing measured is no answer, whatever the policy asks for."""
        return outcome_of(self.all_reasons) if self.scopes else Outcome.NOT_ENOUGH

    @property
    def mismatch(self) -> bool:
        """Whether a checkpoint or a count of transfers is wrong."""
        return any(reason.kind == "mismatch" for reason in self.all_reasons)

    @property
    def exit_code(self) -> int:
        """0 adopt, 3 hold, 4 not enough data, 5 mismatch."""
        return MISMATCH_EXIT_CODE if self.mismatch else EXIT_CODES[self.outcome]

    @property
    def headline(self) -> str:
        """The answer and its main reason, in one line."""
        main = main_reason(self.all_reasons)
        if main is None:
            ratios = [case.ratio for scope in self.scopes for case in scope.cases]
            worst = max(ratio.high for ratio in ratios if isinstance(ratio, Interval))
            return f"{self.outcome}: at most {worst:.2f} of {self.baseline}'s fence time in every case"
        where = f" ({main.where})" if main.where else ""
        return f"{self.outcome}: {main.words if main.kind == 'unfit' else main}{where}"


# The first kind that is there decides.
_PRECEDENCE: tuple[Kind, ...] = ("mismatch", "hold", "unfit", "missing")


def counting(case: CaseDecision) -> tuple[Reason, ...]:
    """Return the reasons of a case that count: all where it votes, else a mismatch alone."""
    return tuple(reason for reason in case.reasons if case.votes or reason.kind == "mismatch")


def outcome_of(reasons: Iterable[Reason]) -> Outcome:
    """Return the answer that reasons lead to."""
    kinds = {reason.kind for reason in reasons}
    if kinds & {"mismatch", "hold"}:
        return Outcome.HOLD
    return Outcome.NOT_ENOUGH if kinds else Outcome.ADOPT


def main_reason(reasons: Sequence[Reason]) -> Reason | None:
    """Return the reason that decides, or None."""
    return min(reasons, key=lambda reason: _PRECEDENCE.index(reason.kind), default=None)


def decide(runs: Sequence[Run], policy: Policy, path: str | None = None) -> Decision:
    """Apply the policy to runs.

    Args:
        path: the candidate; the policy's own where None.

    A case that several runs measured must pass in each: a good run does not take a bad one back. One on other hardware
    than the policy asks for says nothing either way, except that a mismatch is a mismatch anywhere.
    """
    if path is not None:
        policy = replace(policy, paths=replace(policy.paths, candidate=path))
    cases: list[CaseDecision] = []
    reasons = [reason for run in runs for reason in _fault_reasons(run)]
    if not any(_has_gpu(run) for run in runs):
        needed = f"the policy asks for {policy.hardware.gpu}"
        reasons.insert(0, Reason("unfit", "device", f"no GPU was measured; {needed}", _required_command(policy)))
    for run in runs:
        try:
            cases += [_decide_case(evidence, policy) for evidence in collect(run)]
        except Exception as error:  # whatever went wrong, it is no yes
            reasons.append(Reason("unfit", run.run_id, f"cannot be judged: {type(error).__name__}: {error}"))
    cases = _without_superseded(cases)
    names = dict.fromkeys([*policy.cases.required, *(case.scope for case in cases if case.family_votes)])
    return Decision(
        path=policy.paths.candidate,
        baseline=policy.paths.baseline,
        policy_digest=policy.digest,
        run_ids=tuple(run.run_id for run in runs),
        scopes=tuple(_decide_scope(name, [c for c in cases if c.votes and c.scope == name], policy) for name in names),
        others=tuple(case for case in cases if not case.votes),
        reasons=tuple(reasons),
    )


def _fault_reasons(run: Run) -> list[Reason]:
    shown = [Reason("unfit", run.run_id, fault) for fault in run.faults[:MOST_FAULTS]]
    rest = len(run.faults) - len(shown)
    return [*shown, *([Reason("unfit", run.run_id, f"and {rest} more faults of its files")] if rest else [])]


def _has_gpu(run: Run) -> bool:
    return any(record.device is not None and record.device.kind == "cuda" for record in run.records)


def _required_command(policy: Policy) -> str:
    return run_command(policy, [scope.split()[0] for scope in policy.cases.required])


def _without_superseded(cases: Sequence[CaseDecision]) -> list[CaseDecision]:
    """Let a case on foreign hardware vote only where no run has it on the right one."""
    fitting = {case.title for case in cases if case.votes and case.fits_hardware}
    return [replace(case, votes=False) if not case.fits_hardware and case.title in fitting else case for case in cases]


def _decide_scope(scope: str, cases: Sequence[CaseDecision], policy: Policy) -> ScopeDecision:
    preset = scope.split()[0]
    reasons = [
        Reason("missing", "ranks", f"{scope}: not measured on {ranks} ranks", run_command(policy, [preset]))
        for ranks in policy.hardware.ranks
        if not any(case.world_size == ranks for case in cases)
    ]
    return ScopeDecision(scope, tuple(cases), tuple(reasons))


def _decide_case(evidence: CaseEvidence, policy: Policy) -> CaseDecision:
    if evidence.run.faults:
        return _faulty_case(evidence, policy)
    hardware = list(_hardware_reasons(evidence, policy))
    ratio = ratio_of(evidence, policy.paths.candidate, policy)
    family_votes = evidence.case["family"] in policy.cases.families
    return CaseDecision(
        run_id=evidence.run.run_id,
        title=evidence.title,
        scope=evidence.scope,
        world_size=evidence.world_size,
        family_votes=family_votes,
        votes=family_votes and evidence.world_size in policy.hardware.ranks,
        fits_hardware=not hardware,
        ratio=ratio,
        reasons=tuple(
            replace(reason, where=evidence.title)
            for reason in (*hardware, *_reasons(evidence, ratio, not hardware, policy))
        ),
    )


def _faulty_case(evidence: CaseEvidence, policy: Policy) -> CaseDecision:
    """A run whose files have faults says nothing but what is wrong: what is left of it may be the better half."""
    faults = f"{len(evidence.run.faults)} faults in the files of its run"
    wrong = mismatches(evidence, (policy.paths.baseline, policy.paths.candidate))
    reasons = (*wrong, Reason("unfit", evidence.run.run_id, faults))
    family_votes = evidence.case["family"] in policy.cases.families
    return CaseDecision(
        run_id=evidence.run.run_id,
        title=evidence.title,
        scope=evidence.scope,
        world_size=evidence.world_size,
        family_votes=family_votes,
        votes=family_votes and evidence.world_size in policy.hardware.ranks,
        # Whatever it was measured on: a good run beside it does not make up for it.
        fits_hardware=True,
        ratio=Missing(faults),
        reasons=tuple(replace(reason, where=evidence.title) for reason in reasons),
    )


def ratio_of(evidence: CaseEvidence, path: str, policy: Policy) -> Interval | Missing:
    """Return the fence time of a path over the baseline's."""
    key = (path, policy.paths.baseline, policy.bootstrap)
    if key not in evidence.memo:
        pairs = evidence.pairs(policy.paths.baseline, path)
        evidence.memo[key] = pairs if isinstance(pairs, Missing) else paired_ratio(*pairs[:2], policy.bootstrap)
    ratio: Interval | Missing = evidence.memo[key]
    return ratio


def _reasons(
    evidence: CaseEvidence, ratio: Interval | Missing, fits_hardware: bool, policy: Policy
) -> Iterator[Reason]:
    """Yield every reason of a case but its hardware's. Time and memory are judged only where they can be.

    On foreign hardware the whole case is to be measured again, so nothing else about it matters but a mismatch.
    """
    yield from mismatches(evidence, (policy.paths.baseline, policy.paths.candidate))
    if not fits_hardware:
        return
    sides = [evidence.paths.get(name) for name in (policy.paths.baseline, policy.paths.candidate)]
    command = run_command(policy, [str(evidence.case["preset"])])
    absent = [
        Reason("missing", "path", f"path {name} was not measured", command)
        for name, side in zip((policy.paths.baseline, policy.paths.candidate), sides, strict=True)
        if side is None
    ]
    if absent:
        yield from absent
        return
    paths = [side for side in sides if side is not None]
    unfit = [
        *_run_reasons(evidence, policy),
        *_repeat_reasons(evidence, ratio, policy),
        *_believable_reasons(evidence, paths, ratio, policy),
        *_stability_reasons(evidence, paths, policy),
    ]
    yield from (replace(reason, command=reason.command or command) for reason in unfit)
    missing = [*_trouble_reasons(evidence, paths), *_figure_reasons(evidence, paths, policy)]
    yield from (replace(reason, command=reason.command or command) for reason in missing)
    if not unfit:
        yield from _time_reasons(evidence, ratio, policy)
        yield from _memory_reasons(evidence, paths, policy)


def _hardware_reasons(evidence: CaseEvidence, policy: Policy) -> Iterator[Reason]:
    """Yield why what was measured is not the hardware that the policy asks for."""
    wanted = policy.hardware
    command = run_command(policy, [str(evidence.case["preset"])])
    together = [r for path in evidence.paths.values() for r in path.good if not path.capture_only]
    devices = [record.device for record in together]
    if not devices or None in devices:
        yield Reason("unfit", "device", "no record says on which device", command)
        return
    known = [device for device in devices if device is not None]
    kinds = sorted({device.kind for device in known})
    if kinds != [wanted.device_kind]:
        found = f"no GPU was measured; found {', '.join(kinds)}, expected {wanted.gpu}"
        yield Reason("unfit", "device.kind", found, command)
        return
    names = sorted({device.name or "a GPU without a name" for device in known})
    if not all(wanted.gpu in name for name in names):
        yield Reason("unfit", "device.name", f"measured on {', '.join(names)}; expected {wanted.gpu}", command)
    gpus = {device.uuid_hash for device in known}
    ranks = {record.identity.rank for record in together}
    if wanted.one_gpu_a_rank and (any(device.shared for device in known) or None in gpus or len(gpus) != len(ranks)):
        words = f"{len(ranks)} ranks were on {len(gpus - {None})} known GPUs; expected one each"
        yield Reason("unfit", "device.shared", words, command)
    slices = {gpu.get("uuid_hash"): gpu.get("mig") for gpu in evidence.run.info["environment"]["start"]["gpus"]}
    for gpu in sorted(gpu for gpu in gpus if gpu is not None):
        if slices.get(gpu) is not wanted.mig:
            words = f"MIG is {_flag(slices.get(gpu))}; expected {_flag(wanted.mig)}"
            yield Reason("unfit", "gpu.mig", words, command)


def _flag(value: bool | None) -> str:
    return {True: "on", False: "off", None: "not known"}[value]


def _run_reasons(evidence: CaseEvidence, policy: Policy) -> Iterator[Reason]:
    """Yield what is wrong with the run as a whole."""
    run = evidence.run
    if run.status != policy.run.status:
        remedy = f"python -m benchmarks resume {run.run_id}"
        yield Reason("unfit", "status", f"the run is {run.status}; expected {policy.run.status}", remedy)
    for doubt in run.info.get("doubts", ()):
        if doubt["ok"] is False and any(name in doubt["what"] for name in policy.run.blocking_doubts):
            words = f"{doubt['what']}: {doubt['found']}, limit {doubt['limit']}; {doubt['remedy']}"
            yield Reason("unfit", "doubts", words, "python -m benchmarks check")
    dirty = run.setting("environment", "start", "git", "dirty")
    if policy.run.clean_checkout and dirty is not False:
        found = "dirty" if dirty is True else f"not known to be clean ({dirty})"
        yield Reason("unfit", "git.dirty", f"the checkout was {found}; expected a commit as it is")
    for keys in (("code_digests", "packckpt"), ("gpu_driver",), ("git", "commit")):
        start, end = (run.setting("environment", when, *keys) for when in ("start", "end"))
        if isinstance(start, Missing) or isinstance(end, Missing) or start != end:
            words = f"{'.'.join(keys)} was {start} at the start and {end} at the end; expected the same"
            yield Reason("unfit", f"environment.{'.'.join(keys)}", words)


def _repeat_reasons(evidence: CaseEvidence, ratio: Interval | Missing, policy: Policy) -> Iterator[Reason]:
    """Yield what was measured too few times."""
    if isinstance(ratio, Missing):
        yield Reason("unfit", "fence_seconds", f"the ratio cannot be told: {ratio}")
        return
    for name, found, least in (
        ("rounds", ratio.rounds, policy.repeats.rounds_at_least),
        ("pairs", ratio.samples, policy.repeats.pairs_at_least),
    ):
        if found < least:
            yield Reason("unfit", "fence_seconds", f"{found} {name}; expected at least {least}")
    pairs = evidence.pairs(policy.paths.baseline, policy.paths.candidate)
    if not isinstance(pairs, Missing) and pairs[2]:
        words = f"{pairs[2]} saves have no partner on the other path"
        yield Reason("unfit", "fence_seconds", words)


def mismatches(evidence: CaseEvidence, paths: Sequence[str]) -> Iterator[Reason]:
    """Yield where checkpoints differ, or transfers are not what the plan predicts."""
    found: list[Disagreement] = []
    difference = digest_disagreement([evidence.paths[name] for name in paths if name in evidence.paths])
    if difference is not None:
        found.append(difference)
    for name in paths:
        if name in evidence.paths:
            found += evidence.paths[name].transfer_disagreements
    for disagreement in found:
        words = f"{'; '.join(disagreement.found)}"
        yield Reason("mismatch", disagreement.figure, words)


def _trouble_reasons(evidence: CaseEvidence, paths: Sequence[PathEvidence]) -> Iterator[Reason]:
    """Yield what failed, was skipped or is absent."""
    for path in paths:
        for trouble in path.troubles:
            yield Reason("missing", f"records of {path.path}", f"{trouble}")


def _figure_reasons(evidence: CaseEvidence, paths: Sequence[PathEvidence], policy: Policy) -> Iterator[Reason]:
    """Yield required figures that are not there."""
    for name in policy.figures.required:
        if name == "pinned_bytes_per_second":
            value = evidence.ceiling()
            if isinstance(value, Missing):
                yield Reason("missing", name, f"{value}")
            continue
        lacking: dict[str, list[str]] = {}
        for path in paths:
            value = path.figure(name)
            if isinstance(value, Missing):
                lacking.setdefault(str(value), []).append(path.path)
        for why, who in lacking.items():
            yield Reason("missing", name, f"{' and '.join(who)}: {why}")
    for path in paths:
        saves = len(path.memory) // evidence.world_size
        if saves < policy.repeats.memory_saves_at_least:
            least = policy.repeats.memory_saves_at_least
            words = f"{path.path}: {saves} saves in the memory pass; expected at least {least}"
            yield Reason("missing", "host_peak_bytes", words)


def _believable_reasons(
    evidence: CaseEvidence, paths: Sequence[PathEvidence], ratio: Interval | Missing, policy: Policy
) -> Iterator[Reason]:
    """Yield figures that cannot be: too good, or at odds with another."""
    for figure, words in doubts(evidence, paths, ratio, policy):
        yield Reason("unfit", figure, f"cannot be true: {words}")


def _stability_reasons(evidence: CaseEvidence, paths: Sequence[PathEvidence], policy: Policy) -> Iterator[Reason]:
    """Yield samples that do not come from one source."""
    for path in paths:
        steady = path.steady()
        if isinstance(steady, Missing):
            continue
        for found in instabilities(path.path, steady, policy.instability):
            if found.kind in policy.instability.blocking:
                yield Reason("unfit", "fence_seconds", f"fence_seconds of {found}")


def _time_reasons(evidence: CaseEvidence, ratio: Interval | Missing, policy: Policy) -> Iterator[Reason]:
    """Yield that it does not pay, or that one cannot tell."""
    limit = policy.time.fence_ratio_below
    if isinstance(ratio, Missing) or ratio.high < limit:
        return
    found = f"ratio to {policy.paths.baseline} {ratio.value:.3f} [{ratio.low:.3f}-{ratio.high:.3f}]"
    if ratio.low >= limit:
        yield Reason("hold", "fence_seconds", f"{found}, expected below {limit}: {ratio.value - limit:.3f} too much")
    elif ratio.half_width_share <= policy.statistics.precision:
        words = f"{found} is known to ±{ratio.half_width_share:.1%} and not below {limit}: the gain does not show"
        yield Reason("hold", "fence_seconds", words)
    else:
        needed = samples_needed(ratio, policy.statistics.precision)
        yield Reason(
            "unfit",
            "fence_seconds",
            f"{found} holds the limit {limit}: cannot tell; about {needed} pairs would narrow it to "
            f"±{policy.statistics.precision:.0%}, there are {ratio.samples}",
            run_command(policy, [str(evidence.case["preset"])], needed),
        )


def _memory_reasons(evidence: CaseEvidence, paths: Sequence[PathEvidence], policy: Policy) -> Iterator[Reason]:
    """Yield peaks beyond their budget."""
    budget = policy.memory
    for name, ratio, more_bytes in (
        ("host_peak_bytes", budget.host_ratio_at_most, budget.host_more_bytes_at_most),
        ("device_peak_allocated_bytes", 1.0, budget.device_more_bytes_at_most),
    ):
        below, above = (path.figure(name) for path in paths)
        if isinstance(below, Missing) or isinstance(above, Missing):
            continue  # a missing figure has its own reason
        limit = max(below * ratio, below + more_bytes)
        if above > limit:
            words = (
                f"{text(above, 'bytes')} over resident, {paths[0].path} {text(below, 'bytes')}, "
                f"expected at most {text(limit, 'bytes')}: {text(above - limit, 'bytes')} too much"
            )
            yield Reason("hold", name, words)
