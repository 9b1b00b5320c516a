"""The commented settings file and the table of all settings, generated from the texts of the settings themselves."""

from __future__ import annotations

import json
import textwrap

from inference_routing.tier import TIER_NAMES
from inference_tasks.settings.reading import known_settings
from inference_tasks.settings.tree import Settings

__all__ = ["settings_document", "settings_table"]

HEAD = """\
# Settings of inference-tasks, each with its default. Generated; uncomment a line to change it.
#
# The file in use is the one named by INFERENCE_CONFIG, else ./inference.toml, else ./config/inference.toml.
# A variable wins over the file (INFERENCE_BROKER__URL for broker.url, INFERENCE_TIERS__REALTIME__BOUND for
# tiers.realtime.bound), an argument in code over the variable. Durations may be written "30min", sizes "1MiB".
"""


def settings_document() -> str:
    """Return ``config/inference.toml``: every setting commented out at its default, under what it means."""
    lines = [HEAD]
    section = ""
    explained: set[str] = set()
    for known in known_settings():
        here, _, name = known.path.rpartition(".")
        if here != section:
            section = here
            lines += ["", f"[{here}]"]
        text = known.metadata["text"]
        # The three tiers share their texts; once is enough.
        if text not in explained:
            explained.add(text)
            lines += ["", *(f"# {line}" for line in textwrap.wrap(text, 110))]
        if known.default is None:
            lines.append(f"# {name} =")
        else:
            lines.append(f"# {name} = {_toml(known.path, known.default)}")
    return "\n".join(lines) + "\n"


def _toml(path: str, value: object) -> str:
    if path == "state.prefix":
        # Shown as declared, not as derived from the namespace.
        value = ""
    if path == "worker.tiers" and value == Settings().worker.tiers:
        value = "all"
    if isinstance(value, float) and value == int(value):
        return f"{value:.1f}"
    return json.dumps(value)


def settings_table() -> str:
    """Return the table of ``config/README.md``: every setting, its default and what it means, in Markdown.

    What the tiers have in common is one row, with the defaults of the three in their order.
    """
    texts: dict[str, str] = {}
    defaults: dict[str, list[str]] = {}
    for known in known_settings():
        path = known.path
        for tier in TIER_NAMES:
            path = path.replace(f"tiers.{tier}.", "tiers.TIER.")
        texts[path] = known.metadata["text"].replace("|", "\\|")
        default = "" if known.default is None else f"`{_toml(known.path, known.default)}`"
        defaults.setdefault(path, []).append(default)
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for path, text in texts.items():
        values = defaults[path]
        told = values[0] if len(set(values)) == 1 else " ".join(value or "–" for value in values)
        lines.append(f"| `{path}` | {told or '–'} | {text} |")
    return "\n".join(lines) + "\n"
