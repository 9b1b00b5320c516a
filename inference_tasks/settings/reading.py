"""Reading settings: defaults < TOML file < ``INFERENCE_*`` variables < arguments, and all problems together."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from inference_routing.tier import TIER_NAMES, UnknownTierError, tier_name
from inference_tasks.errors import SettingsError, nearest
from inference_tasks.settings.tree import Settings

__all__ = ["CONFIG_VARIABLE", "find_file", "known_paths", "load_settings"]

CONFIG_VARIABLE = "INFERENCE_CONFIG"
PREFIX = "INFERENCE_"
FILES = ("inference.toml", "config/inference.toml")

_UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_BYTES = {"b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "kb": 1000, "mb": 1000**2, "gb": 1000**3}


@dataclass(frozen=True)
class Known:
    """One setting that exists: where it is, what it may hold, what it holds by default."""

    path: str
    annotation: object
    default: object
    metadata: Mapping[str, Any]


def known_settings(node: object = None, prefix: str = "") -> Iterator[Known]:
    """Walk over every setting of the tree, depth first, in the order of the declarations."""
    node = Settings() if node is None else node
    hints = get_type_hints(type(node))
    for one in fields(cast(Any, node)):
        value = getattr(node, one.name)
        if one.name == "origins":
            continue
        if is_dataclass(value):
            yield from known_settings(value, f"{prefix}{one.name}.")
        else:
            yield Known(f"{prefix}{one.name}", hints[one.name], value, one.metadata)


def known_paths() -> list[str]:
    """Return the dotted paths of all settings."""
    return [known.path for known in known_settings()]


def find_file(environ: Mapping[str, str], directory: Path | None = None) -> Path | None:
    """Return the settings file in use: ``INFERENCE_CONFIG``, else ``inference.toml``, else ``config/inference.toml``.

    A file named by the variable is returned even if it does not exist, so that its absence is reported.
    """
    named = environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named)
    directory = directory or Path.cwd()
    return next((directory / name for name in FILES if (directory / name).is_file()), None)


def load_settings(
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Read the settings from one file, the variables and the overrides, the later winning over the earlier.

    Overrides may be nested (``{"tiers": {"realtime": {"bound": 5}}}``), dotted (``{"tiers.realtime.bound": 5}``).
    Nothing is read but what is passed: no variable, and no file unless ``file`` names it (see ``find_file``).

    Raises:
        SettingsError: with every problem found: unknown keys with the nearest known one, values of a wrong type or out
            of range, and combinations that cannot be kept.
    """
    known = {one.path: one for one in known_settings()}
    problems: list[str] = []
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for origin, found in (
        *_from_file(file, problems),
        *_from_variables(environ or {}, known, problems),
        *(("argument", pair) for pair in _flat(overrides or {})),
    ):
        path, raw = _canonical(found[0]), found[1]
        if path not in known:
            problems.append(_unknown(path, known, origin))
            continue
        try:
            values[path] = _value(known[path], raw)
        except ValueError as error:
            problems.append(f"{path} ({origin}): {error}")
            continue
        origins[path] = origin
    settings = cast(Settings, _rebuilt(Settings(), "", values, MappingProxyType(origins)))
    if not problems:
        problems = list(_contradictions(settings))
    if problems:
        raise SettingsError(problems)
    return settings


def _flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _from_file(file: Path | None, problems: list[str]) -> list[tuple[str, tuple[str, object]]]:
    if file is None:
        return []
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"The settings file {file} cannot be read: {error.strerror or error}.")
        return []
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"The settings file {file} is not valid TOML: {error}.")
        return []
    return [(str(file), pair) for pair in _flat(tree)]


def _from_variables(
    environ: Mapping[str, str], known: Mapping[str, Known], problems: list[str]
) -> list[tuple[str, tuple[str, object]]]:
    found: list[tuple[str, tuple[str, object]]] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        path = _canonical(variable.removeprefix(PREFIX).lower().replace("__", "."))
        # Orchestrators export variables of their own for a service called "inference" (INFERENCE_PORT,
        # INFERENCE_SERVICE_HOST): one without a section is an error only when it looks like a misspelled setting.
        if path in known or "__" in variable:
            found.append((variable, (path, text)))
        elif guess := nearest(path, [one for one in known if "." not in one]):
            problems.append(f"{variable}: there is no such setting; did you mean {PREFIX}{guess.upper()}?")
    return found


def _canonical(path: str) -> str:
    """Spell the tier of ``tiers.P0.bound`` in full."""
    parts = path.split(".")
    if parts[0] == "tiers" and len(parts) > 1:
        try:
            parts[1] = tier_name(parts[1])
        except UnknownTierError:
            return path
    return ".".join(parts)


def _unknown(path: str, known: Mapping[str, Known], origin: str) -> str:
    section = path.rpartition(".")[0]
    guess = nearest(path, known) or nearest(path.rpartition(".")[2], [one.rpartition(".")[2] for one in known])
    if guess and "." not in guess:
        guess = next((one for one in known if one.rpartition(".")[2] == guess and one.startswith(section)), guess)
    hint = f"did you mean {guess}?" if guess else "`inference-tasks settings show` lists them all."
    return f"{path} ({origin}): there is no such setting; {hint}"


def _value(known: Known, raw: object) -> object:
    """Convert one raw value to its declared type, or raise ValueError saying what was expected and found."""
    options = _alternatives(known.annotation)
    if NoneType in options and (raw is None or raw in ("", "none", "null")):
        return None
    for option in options:
        if get_origin(option) is Literal:
            choices = get_args(option)
            if raw not in choices:
                guess = nearest(str(raw), choices)
                hint = f"; did you mean {guess!r}?" if guess else "."
                raise ValueError(f"expected one of {', '.join(map(repr, choices))}, found {raw!r}{hint}")
            return raw
    if get_origin(options[0]) is tuple:
        return _tiers(raw)
    if str in options:
        if not isinstance(raw, str):
            raise ValueError(f"expected text, found {raw!r}.")
        if known.path == "default_tier":
            return _tier(raw)
        return raw
    if bool in options:
        return _truth(raw)
    return _number(known, raw, whole=float not in options)


def _truth(raw: object) -> bool:
    found = raw if isinstance(raw, bool) else {"true": True, "false": False}.get(str(raw).strip().lower())
    if found is None:
        raise ValueError(f"expected true or false, found {raw!r}.")
    return found


def _alternatives(annotation: object) -> tuple[object, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _tier(text: object) -> str:
    try:
        return tier_name(str(text))
    except UnknownTierError as error:
        raise ValueError(str(error)) from error


def _tiers(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = TIER_NAMES if raw.strip().lower() == "all" else [part.strip() for part in raw.split(",") if part.strip()]
    if not isinstance(raw, list | tuple) or not raw:
        raise ValueError(f'expected "all" or a list of tiers, found {raw!r}.')
    chosen = {_tier(one) for one in raw}
    return tuple(tier for tier in TIER_NAMES if tier in chosen)


def _number(known: Known, raw: object, *, whole: bool) -> float:
    number = _plain_number(known.path, raw, whole=whole)
    least, above, most = (known.metadata[key] for key in ("minimum", "above", "maximum"))
    if least is not None and number < least:
        raise ValueError(f"expected at least {least:g}, found {raw!r}.")
    if above is not None and number <= above:
        raise ValueError(f"expected more than {above:g}, found {raw!r}.")
    if most is not None and number > most:
        raise ValueError(f"expected at most {most:g}, found {raw!r}.")
    return number


def _plain_number(path: str, raw: object, *, whole: bool) -> float:
    wanted = "a whole number" if whole else "a number"
    units: Mapping[str, float] = {}
    if path.endswith("_s"):
        units, wanted = _UNITS_S, 'seconds, such as 30, 0.5 or "30min"'
    elif path.endswith("_bytes"):
        units, wanted = _UNITS_BYTES, 'bytes, such as 65536 or "1MiB"'
    factor: float = 1
    if isinstance(raw, str):
        match = re.fullmatch(r"\s*([-+0-9._eE]+?)\s*([a-zA-Z]*)\s*", raw)
        unit = match.group(2).lower() if match else ""
        if match is None or (unit and unit not in units):
            raise ValueError(f"expected {wanted}, found {raw!r}.")
        factor = units[unit] if unit else 1
        try:
            raw = float(match.group(1))
        except ValueError:
            raise ValueError(f"expected {wanted}, found {raw!r}.") from None
    if isinstance(raw, bool) or not isinstance(raw, int | float) or raw != raw or raw in (float("inf"), float("-inf")):
        raise ValueError(f"expected {wanted}, found {raw!r}.")
    number = raw * factor
    if whole and number != int(number):
        raise ValueError(f"expected {wanted}, found {raw!r}.")
    return int(number) if number == int(number) and (whole or path.endswith("weight")) else float(number)


def _rebuilt(node: Any, prefix: str, values: Mapping[str, object], origins: Mapping[str, str]) -> Any:
    changes: dict[str, object] = {}
    for one in fields(node):
        path = f"{prefix}{one.name}"
        value = getattr(node, one.name)
        if path == "origins":
            changes[one.name] = origins
        elif is_dataclass(value):
            changes[one.name] = _rebuilt(value, f"{path}.", values, origins)
        elif path == "state.prefix":
            # The default follows the namespace: let the tree derive it again.
            changes[one.name] = values.get(path, "")
        else:
            changes[one.name] = values.get(path, value)
    return type(node)(**changes)


def _contradictions(settings: Settings) -> Iterator[str]:
    """Say what is wrong with settings that are each right on their own."""
    worker = settings.worker
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", settings.namespace):
        yield f"namespace: expected letters, digits, '-', '_' and single dots, found {settings.namespace!r}."
    if worker.pool == "solo" and worker.slots != 1:
        yield f"worker.slots: the solo pool has exactly one slot, found {worker.slots}; choose prefork or threads."
    if worker.reserve >= worker.slots and worker.reserve > 0:
        yield (
            f"worker.reserve: expected fewer than worker.slots ({worker.slots}), found {worker.reserve}; a worker for "
            'realtime alone is worker.tiers = ["realtime"].'
        )
    if settings.tiers.realtime.ages_after_s is not None:
        yield "tiers.realtime.ages_after_s: realtime is the highest tier; nothing can move up from it. Leave it unset."
    for name, url, schemes in (
        ("broker.url", settings.broker.url, ("amqp", "amqps", "pyamqp", "redis", "rediss", "redis+socket", "memory")),
        ("broker.management_url", settings.broker.management_url, ("http", "https")),
        ("state.url", settings.state.url, ("redis", "rediss", "unix", "socket", "redis+socket", "sentinel")),
    ):
        scheme = (url or "").partition("://")[0]
        if url is not None and ("://" not in url or scheme not in schemes):
            yield f"{name}: expected a URL that starts with {' or '.join(s + '://' for s in schemes[:2])}."
    if worker.reserve < worker.slots:
        yield from settings.policy().check(worker.slots, worker.reserve)
