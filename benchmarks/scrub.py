"""Take host names, user names and machine paths out of a text that goes into a record."""

from __future__ import annotations

import getpass
import re
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def scrub(text: str) -> str:
    """Return the text with machine paths as `<repo>`, `<site>`, ..., and without host and user names."""
    places = {
        str(ROOT): "<repo>",
        sysconfig.get_path("purelib"): "<site>",
        sysconfig.get_path("stdlib"): "<python>",
        sys.prefix: "<env>",
        sys.base_prefix: "<python>",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "<home>",
    }
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(place, places[place])
    for name, instead in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if name:
            text = re.sub(rf"\b{re.escape(name)}\b", instead, text)
    return text


def scrub_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line without machine paths: those in the repository as `<repo>/...`, others as `<path>`."""
    return [re.sub(r"(^|=)/.*", r"\1<path>", scrub(argument)) for argument in arguments]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
