"""Reading settings: defaults < TOML file < ``INFERENCE_*`` variables < arguments, all problems at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inference_tasks.settings.tree import Settings

__all__ = ["load_settings"]


def load_settings(
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Read the settings."""
    return Settings()
