"""The public names change only on purpose."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.architecture.public_api import SNAPSHOT, snapshot


@pytest.mark.skipif(find_spec("inference_tasks") is None, reason="the package is not there yet")
def test_the_public_names_and_signatures_are_those_of_the_snapshot() -> None:
    assert snapshot() == SNAPSHOT.read_text(), (
        "The public interface has changed. If that is meant, say so in CHANGELOG.md and write the snapshot anew: "
        "python -m tests.architecture.public_api > tests/architecture/public_api.txt"
    )
