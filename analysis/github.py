"""The report where GitHub shows it: the job's summary, and the body of a comment on a pull request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# GitHub refuses a longer comment; a job summary may have 1 MiB a step.
COMMENT_LETTERS = 65_536
SUMMARY_BYTES = 1 << 20
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
# By which a workflow finds the comment that it wrote before.
MARK = "<!-- packckpt analysis report -->"


def comment_body(summaries: Sequence[tuple[str, str]]) -> str:
    """Return one comment for the summaries of runs, each by its id, cut at a line where there is too much.

    Pictures are left to the files: a comment has no folder that they could lie in.
    """
    share = (COMMENT_LETTERS - 2_000) // max(len(summaries), 1)
    parts = [cut(_without_pictures(text), share, f"results/runs/{run_id}/summary.md") for run_id, text in summaries]
    return "\n".join([MARK, *parts])


def write_job_summary(summaries: Sequence[tuple[str, str]], path: Path | None = None) -> Path | None:
    """Append to the job's summary; return its file, or None outside of a job."""
    named = os.environ.get(SUMMARY_VARIABLE)
    path = path or (Path(named) if named else None)
    if path is None:
        return None
    share = (SUMMARY_BYTES - 2_000) // 4 // max(len(summaries), 1)  # a letter may take four bytes
    with open(path, "a", encoding="utf-8") as file:
        for run_id, text in summaries:
            file.write(cut(_without_pictures(text), share, f"results/runs/{run_id}/summary.md"))
    return path


def cut(text: str, letters: int, rest: str) -> str:
    """Return at most that many letters, whole lines, and say where the rest is. What was folded open is closed."""
    if len(text) <= letters:
        return text
    farewell = f"\n\nCut here: the whole is {rest}.\n"
    room = letters - len(farewell) - len("\n</details>\n") - len("\n```\n")
    kept = text[:room].rsplit("\n", 1)[0]
    if kept.count("\n```") % 2:
        kept += "\n```\n"
    if kept.count("<details>") > kept.count("</details>"):
        kept += "\n</details>\n"
    return kept + farewell


def _without_pictures(text: str) -> str:
    return "\n".join(_picture_words(line) if line.startswith("![") else line for line in text.split("\n"))


def _picture_words(line: str) -> str:
    file = line.split("](")[1].rstrip(")")
    return f"(picture: {file})"
