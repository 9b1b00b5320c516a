import pickle

import pytest

from inference_routing.tier import TIER_NAMES, UnknownTierError, tier_name


@pytest.mark.parametrize(
    ("text", "name"),
    [("realtime", "realtime"), ("P0", "realtime"), ("p1", "batch"), ("Batch", "batch"), (" P2 ", "offline")],
)
def test_names_and_aliases_are_resolved_whatever_their_case(text: str, name: str) -> None:
    assert tier_name(text) == name


def test_the_highest_tier_comes_first() -> None:
    assert TIER_NAMES == ("realtime", "batch", "offline")


@pytest.mark.parametrize(("text", "nearest"), [("real-time", "realtime"), ("ofline", "offline"), ("xyz", None)])
def test_an_unknown_tier_names_the_nearest_one(text: str, nearest: str | None) -> None:
    with pytest.raises(UnknownTierError) as caught:
        tier_name(text)
    assert (caught.value.name, caught.value.nearest) == (text, nearest)
    assert repr(text) in str(caught.value)
    assert nearest is None or f"did you mean {nearest!r}" in str(caught.value)


def test_the_error_survives_the_way_from_a_child_process() -> None:
    error = pickle.loads(pickle.dumps(UnknownTierError("bach")))
    assert (error.name, error.nearest) == ("bach", "batch")
