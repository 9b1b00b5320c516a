"""The demo's input: files that are on this machine anyway, as many kinds of them as possible."""

from __future__ import annotations

import os
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from inference_tasks.errors import DeploymentError

__all__ = ["find_files", "roots"]

SMALLEST_BYTES, LARGEST_BYTES = 64, 2**20
LONGEST_SEARCH_S = 3.0
# Of the most frequent kind, so that ten thousand manual pages leave room for the others.
MOST_OF_A_KIND = 300


def roots() -> list[Path]:
    """Return the folders to look in: documents, images, code and archives of the system, and Python's own."""
    places = [Path("/usr/share"), *sorted(Path("/usr/lib").glob("python3*"))]
    places += [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    return [place for place in dict.fromkeys(places) if place.is_dir()]


def find_files(most: int, places: list[Path] | None = None) -> list[Path]:
    """Return up to ``most`` readable files of bounded size, the kinds (by suffix) mixed; in the same order each time.

    Raises:
        DeploymentError: there is none.
    """
    by_kind: dict[str, list[Path]] = {}
    places = roots() if places is None else places
    for place in places:
        end_s = time.monotonic() + LONGEST_SEARCH_S / len(places)
        for path in _walk(place):
            kind = by_kind.setdefault(path.suffix.lower(), [])
            if len(kind) < MOST_OF_A_KIND:
                kind.append(path)
            if time.monotonic() > end_s:
                break
    found = _in_turn(by_kind, most)
    if not found:
        raise DeploymentError(
            f"There are no files to classify in {', '.join(map(str, places)) or 'the usual folders'}."
        )
    random.Random(11).shuffle(found)
    return found


def _walk(place: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(place):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            try:
                about = path.lstat()
            except OSError:
                continue
            is_regular = about.st_mode & 0o170000 == 0o100000
            if is_regular and SMALLEST_BYTES <= about.st_size <= LARGEST_BYTES and os.access(path, os.R_OK):
                yield path


def _in_turn(by_kind: dict[str, list[Path]], most: int) -> list[Path]:
    """Take one of each kind in turn until there are enough."""
    found: list[Path] = []
    waiting = [iter(paths) for paths in by_kind.values()]
    while waiting and len(found) < most:
        left = []
        for kind in waiting:
            path = next(kind, None)
            if path is not None:
                found.append(path)
                left.append(kind)
        waiting = left
    return found[:most]
