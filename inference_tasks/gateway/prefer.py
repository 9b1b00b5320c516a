"""The header ``Prefer`` (RFC 7240): how long a client would like to wait for the result."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["NO_PREFERENCE", "Preferences", "preferences"]

_PREFERENCE = re.compile(r'\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)\s*(?:=\s*("(?:[^"\\]|\\.)*"|[^\s",;]*))?\s*(;[^,]*)?')
_LONGEST_NUMBER = 9


class Preferences(NamedTuple):
    """What a client prefers.

    Attributes:
        wait_s: how long the answer may take; None if it says nothing of that.
        is_async: whether it would rather have an answer at once.
    """

    wait_s: float | None = None
    is_async: bool = False


NO_PREFERENCE = Preferences()


def preferences(headers: Iterable[str]) -> Preferences:
    """Read the values of all ``Prefer`` headers of a request.

    Of a preference that is named twice the first counts, and what cannot be read counts as not said, both by the RFC.
    """
    value_by_name: dict[str, str] = {}
    for header in headers:
        for part in _parts(header):
            found = _PREFERENCE.fullmatch(part)
            if found is not None:
                value_by_name.setdefault(found[1].lower(), (found[2] or "").strip('"'))
    wait = value_by_name.get("wait", "")
    is_number = wait.isascii() and wait.isdigit() and len(wait) <= _LONGEST_NUMBER
    return Preferences(float(wait) if is_number else None, "respond-async" in value_by_name)


def _parts(header: str) -> list[str]:
    """Split at the commas that stand outside of quotes."""
    return re.findall(r'(?:[^,"]|"(?:[^"\\]|\\.)*")+', header)
