"""API keys: made, written, read, found; all that is wrong with a file is told, and nothing secret shown."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from inference_tasks.errors import SettingsError
from inference_tasks.gateway.keys import KeyFile, KeyRing, entry_of, hash_of, new_key, read_keys
from inference_tasks.gateway.limits import Rates
from inference_tasks.gateway.problems import ProblemError


def test_a_new_key_is_found_by_what_was_printed_and_by_nothing_else() -> None:
    secret, key = new_key("acme")
    other, _ = new_key("acme")
    ring = KeyRing([key])
    assert ring.find(secret) == key
    assert ring.find(other) is None
    assert ring.find(key.sha256) is None
    assert ring.find("") is None
    assert ring.find("\ud800") is None


def test_keys_are_random_and_long() -> None:
    secrets = {new_key("a")[0] for _ in range(50)}
    assert len(secrets) == 50
    assert min(map(len, secrets)) >= 4 + 128 // 6


def test_the_entry_of_a_key_is_what_the_file_needs(tmp_path: Path) -> None:
    secret, key = new_key("acme")
    file = tmp_path / "keys.toml"
    file.write_text(entry_of(key) + 'tiers = ["P0"]\nrate_per_s = 5\n')
    (read,) = read_keys(file)
    assert (read.id, read.tenant, read.sha256) == (key.id, "acme", hash_of(secret))
    assert read.tiers == {"realtime"}
    assert (read.rate_per_s, read.in_flight_max) == (5.0, None)
    assert secret not in file.read_text()


def test_json_is_read_too(tmp_path: Path) -> None:
    _, key = new_key("acme")
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": tomllib.loads(entry_of(key))["keys"]}))
    assert read_keys(file) == [key]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "at least one"),
        ("keys = 3", "at least one"),
        ("[[keys]\n", "neither TOML nor JSON"),
        ('[[keys]]\ntennant = "x"', "did you mean tenant?"),
        ('[[keys]]\nid = "a b"', "id: expected"),
        ("[[keys]]\nrate_per_s = 0", "rate_per_s: expected"),
        ("[[keys]]\nin_flight_max = true", "in_flight_max: expected"),
        ('[[keys]]\ntiers = ["relatime"]', "did you mean 'realtime'"),
        ("[[keys]]\ntiers = []", "tiers: expected"),
        ('[[keys]]\nmay_name_tenants = "yes"', "may_name_tenants: expected"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_keys(file)
    assert problem in str(caught.value)


def test_a_key_in_place_of_its_hash_is_not_shown(tmp_path: Path) -> None:
    secret, key = new_key("acme")
    file = tmp_path / "keys.toml"
    file.write_text(entry_of(key).replace(key.sha256, secret))
    with pytest.raises(SettingsError) as caught:
        read_keys(file)
    assert secret not in str(caught.value)


def test_two_keys_are_not_one(tmp_path: Path) -> None:
    _, key = new_key("acme")
    file = tmp_path / "keys.toml"
    file.write_text(entry_of(key) * 2)
    with pytest.raises(SettingsError, match="two keys have the id"):
        read_keys(file)


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    (old, old_key), (new, added) = new_key("acme"), new_key("acme")
    now_s = 0.0
    file = tmp_path / "keys.toml"
    file.write_text(entry_of(old_key))
    keys = KeyFile(file, clock=lambda: now_s)
    file.write_text(entry_of(old_key) + entry_of(added))
    assert keys.find(new) is None
    now_s = 1.0
    assert keys.find(new) == added
    assert keys.find(old) == old_key
    file.write_text("{")
    now_s = 2.0
    assert keys.find(new) == added
    file.unlink()
    now_s = 3.0
    assert keys.find(new) == added
    file.write_text(entry_of(added))
    now_s = 4.0
    assert keys.find(old) is None


def test_a_key_asks_as_often_as_it_may_and_is_told_when_next() -> None:
    _, key = new_key("acme")
    limited = type(key)(key.id, key.sha256, key.tenant, rate_per_s=2.0)
    now_s = 0.0
    rates = Rates(clock=lambda: now_s)
    rates.take(limited)
    rates.take(limited)
    with pytest.raises(ProblemError) as caught:
        rates.take(limited)
    assert caught.value.status == 429
    assert caught.value.extensions["retry_after_s"] == 0.5
    now_s = 0.5
    rates.take(limited)
    now_s = 100.0
    rates.take(limited)
    rates.take(limited)
    with pytest.raises(ProblemError):
        rates.take(limited)
    for _ in range(100):
        rates.take(key)
