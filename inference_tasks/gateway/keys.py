"""API keys: who may ask, for which tenant and tiers, and how much.

The file holds hashes only. A key is 256 random bits, so its plain SHA-256 cannot be searched for; a slow hash, made for
passwords that people choose, would only cost time at every request.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from inference_routing.tier import TIER_NAMES, UnknownTierError, tier_name
from inference_tasks.errors import SettingsError, nearest
from inference_tasks.task import TENANT

__all__ = ["OPEN", "ApiKey", "KeyFile", "KeyRing", "entry_of", "hash_of", "new_key", "read_keys"]

log = logging.getLogger(__name__)

_PREFIX = "itk_"  # lets scanners for leaked secrets recognise one
_KEY_BYTES = 32
_LOOK_EVERY_S = 1.0
_TENANT = re.compile(TENANT)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What the holder of one key may do. Two keys of one tenant are valid side by side: that is how keys are changed.

    Attributes:
        id: names the key in logs and counts; not secret.
        sha256: of the key, in hexadecimal digits.
        tenant: whose tasks these are; one tenant never sees those of another. None only without keys.
        tiers: which tiers it may submit to.
        rate_per_s: how many requests a second, with bursts of as many; None for any number.
        in_flight_max: how many of its tasks may be under way; None for any number.
        may_name_tenants: whether it may submit for other tenants, and so sees the tasks of all.
    """

    id: str
    sha256: str
    tenant: str | None
    tiers: frozenset[str] = frozenset(TIER_NAMES)
    rate_per_s: float | None = None
    in_flight_max: int | None = None
    may_name_tenants: bool = False

    def may_see(self, tenant: str | None) -> bool:
        """Whether a task of this tenant exists for it."""
        return self.may_name_tenants or tenant == self.tenant


OPEN = ApiKey("", "", None, may_name_tenants=True)
"""Who asks where there are no keys: anybody on this machine."""


class KeyRing:
    """The keys that are valid."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)
        self._hashes = tuple(key.sha256.encode() for key in self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """Return the key that this is, in a time that does not tell how near it came."""
        wanted = hash_of(presented).encode()
        found = None
        for key, known in zip(self._keys, self._hashes, strict=True):
            if hmac.compare_digest(known, wanted):
                found = key
        return found


class KeyFile:
    """A key ring in a file, read again when the file changes; while a new version cannot be read the old one holds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file.

        Raises:
            SettingsError: with all that is wrong with it.
        """
        self.path = path
        self._clock = clock
        self._looked_at_s = clock()
        self._version = _version(path)
        self._ring = KeyRing(read_keys(path))

    def find(self, presented: str) -> ApiKey | None:
        """Return the key that this is; a file that has changed is noticed within a second."""
        now_s = self._clock()
        if now_s - self._looked_at_s >= _LOOK_EVERY_S:
            self._looked_at_s = now_s
            version = _version(self.path)
            if version != self._version:
                self._version = version
                try:
                    self._ring = KeyRing(read_keys(self.path))
                    log.info("The keys in %s have been read again", self.path)
                except SettingsError as error:
                    log.error("The keys in %s stay as they were: %s", self.path, error)
        return self._ring.find(presented)


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def hash_of(key: str) -> str:
    """Return what the file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(tenant: str) -> tuple[str, ApiKey]:
    """Return a new key and its entry.

    Raises:
        SettingsError: the tenant's name cannot be one.
    """
    if not _TENANT.fullmatch(tenant):
        raise SettingsError([_bad_tenant("tenant", tenant)])
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return key, ApiKey(f"{tenant}-{secrets.token_hex(4)}", hash_of(key), tenant)


def entry_of(key: ApiKey) -> str:
    """Return the entry of a new key for the TOML file."""
    return (
        f"[[keys]]\nid = {json.dumps(key.id)}\ntenant = {json.dumps(key.tenant)}\nsha256 = {json.dumps(key.sha256)}\n"
    )


def read_keys(path: Path) -> list[ApiKey]:
    """Read a file of keys: a list ``keys`` of tables, in TOML, or in JSON if the name ends with ``.json``.

    Raises:
        SettingsError: with all that is wrong with it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree: object = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError([f"The file of keys {path} cannot be read: {error.strerror or error}."]) from error
    except ValueError as error:
        raise SettingsError([f"The file of keys {path} is neither TOML nor JSON: {error}."]) from error
    rows = tree.get("keys") if isinstance(tree, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise SettingsError([f"{path}: expected tables [[keys]], at least one."])
    problems: list[str] = []
    keys = [_key(row, f"{path}: key {number}", problems) for number, row in enumerate(rows, 1)]
    for name in ("id", "sha256"):
        values = [getattr(key, name) for key in keys]
        problems += [
            f"{path}: two keys have the {name} {one}."
            for one in sorted({v for v in values if v and values.count(v) > 1})
        ]
    if problems:
        raise SettingsError(problems)
    return keys


def _key(row: Mapping[str, object], where: str, problems: list[str]) -> ApiKey:
    known = [one.name for one in fields(ApiKey)]
    for name in row:
        if name not in known:
            guess = nearest(str(name), known)
            problems.append(
                f"{where}: there is no {name!r}; " + (f"did you mean {guess}?" if guess else f"known: {known}.")
            )
    key_id, sha256, tenant = (row.get(name) for name in ("id", "sha256", "tenant"))
    if not isinstance(key_id, str) or not _TENANT.fullmatch(key_id):
        problems.append(f"{where}: id: expected up to 64 letters, digits and _.@-, found {key_id!r}.")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        # Not shown: it may be the key itself.
        problems.append(f"{where}: sha256: expected 64 hexadecimal digits, in small letters.")
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        problems.append(_bad_tenant(f"{where}: tenant", tenant))
    rate, most = row.get("rate_per_s"), row.get("in_flight_max")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e9):
        problems.append(f"{where}: rate_per_s: expected a number above 0, found {rate!r}.")
        rate = None
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        problems.append(f"{where}: in_flight_max: expected a whole number above 0, found {most!r}.")
        most = None
    may_name = row.get("may_name_tenants", False)
    if not isinstance(may_name, bool):
        problems.append(f"{where}: may_name_tenants: expected true or false, found {may_name!r}.")
    return ApiKey(
        id=str(key_id),
        sha256=str(sha256),
        tenant=str(tenant),
        tiers=_tiers(row.get("tiers", list(TIER_NAMES)), where, problems),
        rate_per_s=float(rate) if isinstance(rate, int | float) else None,
        in_flight_max=most if isinstance(most, int) else None,
        may_name_tenants=may_name is True,
    )


def _tiers(value: object, where: str, problems: list[str]) -> frozenset[str]:
    if not isinstance(value, list) or not value:
        problems.append(f"{where}: tiers: expected a list of tiers, found {value!r}.")
        return frozenset()
    try:
        return frozenset(tier_name(str(one)) for one in value)
    except UnknownTierError as error:
        problems.append(f"{where}: tiers: {error}.")
        return frozenset()


def _bad_tenant(where: str, found: object) -> str:
    return f"{where}: expected up to 64 letters, digits and _.@-, found {found!r}."
