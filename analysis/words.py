"""A decision as text for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from analysis.decision import CaseDecision, Decision, Reason, ScopeDecision, counting
from analysis.missing import Missing
from analysis.tables import wrap

# Of one case: whoever decides reads these, and `decide --json` has them all.
MOST_REASONS = 12


def decision_text(decision: Decision) -> str:
    """Return the decision for a terminal or GitHub: headline, scopes, cases, reasons, and what to type next."""
    lines = [f"**{decision.headline}**", ""]
    lines += [wrap(f"{decision.path} instead of {decision.baseline}, by policy {decision.policy_digest}."), ""]
    lines += _bullets(decision.reasons)
    for scope in decision.scopes:
        lines += _scope_lines(scope)
    wrong = [reason for case in decision.others for reason in counting(case)]
    if wrong:
        lines += ["- cases that do not vote:", *_bullets(wrong, "  ")]
    if decision.others:
        names = sorted({case.title.split("/")[0] for case in decision.others})
        lines += [wrap(f"{len(decision.others)} more cases were compared and do not vote: {', '.join(names)}.", "- ")]
    commands = list(dict.fromkeys(reason.command for reason in decision.all_reasons if reason.command))
    if commands:
        lines += ["", "What would measure it:", "", "```sh", *commands, "```"]
    return "\n".join(lines).rstrip() + "\n"


def _scope_lines(scope: ScopeDecision) -> list[str]:
    lines = [f"- {scope.scope}: **{scope.outcome}**", *_bullets(scope.reasons, "  ")]
    for case in scope.cases:
        lines.append(wrap(f"{case.title}: {case.outcome}, ratio {_ratio_words(case)}", "  - "))
        lines += _bullets(counting(case), "    ")
    return lines


def _ratio_words(case: CaseDecision) -> str:
    if isinstance(case.ratio, Missing):
        return f"not told ({case.ratio})"
    return f"{case.ratio.value:.3f} [{case.ratio.low:.3f}-{case.ratio.high:.3f}] from {case.ratio.samples} pairs"


def _bullets(reasons: Iterable[Reason], indent: str = "") -> list[str]:
    unique = list(dict.fromkeys(f"{reason.kind}: {reason}" for reason in reasons))
    lines = [wrap(words, f"{indent}- ") for words in unique[:MOST_REASONS]]
    if len(unique) > MOST_REASONS:
        lines.append(f"{indent}- and {len(unique) - MOST_REASONS} more (`decide --json` has them all)")
    return lines


def decision_json(decision: Decision) -> dict[str, Any]:
    """Return the decision as JSON values."""
    return {
        "outcome": str(decision.outcome),
        "mismatch": decision.mismatch,
        "exit_code": decision.exit_code,
        "headline": decision.headline,
        "path": decision.path,
        "baseline": decision.baseline,
        "policy_digest": decision.policy_digest,
        "runs": list(decision.run_ids),
        "scopes": [
            {
                "scope": scope.scope,
                "outcome": str(scope.outcome),
                "cases": [_case_json(case) for case in scope.cases],
                "reasons": _reasons_json(scope.reasons),
            }
            for scope in decision.scopes
        ],
        "not_voting": [_case_json(case) for case in decision.others],
        "reasons": _reasons_json(decision.reasons),
    }


def _case_json(case: CaseDecision) -> dict[str, Any]:
    ratio: dict[str, Any] = {"ratio": None, "reason": str(case.ratio)}
    if not isinstance(case.ratio, Missing):
        ratio = {
            "ratio": round(case.ratio.value, 6),
            "low": round(case.ratio.low, 6),
            "high": round(case.ratio.high, 6),
            "pairs": case.ratio.samples,
            "rounds": case.ratio.rounds,
        }
    return {
        "case": case.title,
        "run": case.run_id,
        "outcome": str(case.outcome),
        "fence": ratio,
        "reasons": _reasons_json(case.reasons),
    }


def _reasons_json(reasons: Sequence[Reason]) -> list[dict[str, Any]]:
    return [
        {"kind": reason.kind, "figure": reason.figure, "words": reason.words, "command": reason.command}
        for reason in reasons
    ]
