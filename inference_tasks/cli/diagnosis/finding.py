"""One thing that the doctor found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level", "error", "fine", "warning"]

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do about it.

    Attributes:
        level: ``error`` breaks a promise or will; ``warning`` may.
        subject: what was looked at, such as ``broker: rights``.
        found: how it is.
        advice: what to do; empty when nothing is to be done.
    """

    level: Level
    subject: str
    found: str
    advice: str = ""


def fine(subject: str, found: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding("ok", subject, found)


def warning(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that may become trouble."""
    return Finding("warning", subject, found, advice)


def error(subject: str, found: str, advice: str) -> Finding:
    """Return a finding that is trouble."""
    return Finding("error", subject, found, advice)
