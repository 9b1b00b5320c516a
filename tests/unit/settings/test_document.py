"""The settings file that ships is the one that the settings describe."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from inference_tasks.settings import Settings, load_settings, settings_document
from inference_tasks.settings.document import settings_table
from inference_tasks.settings.reading import known_paths

SHIPPED = Path(__file__).parents[3] / "config" / "inference.toml"


def test_the_shipped_file_is_in_step_with_the_settings() -> None:
    assert SHIPPED.read_text(encoding="utf-8") == settings_document(), (
        "write inference_tasks.settings.settings_document() to config/inference.toml"
    )


def test_the_file_changes_nothing_as_it_ships() -> None:
    assert load_settings(file=SHIPPED) == Settings()


def test_uncommented_it_says_the_defaults(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = .+)$", r"\1", settings_document(), flags=re.MULTILINE)
    assert len(re.findall(r"^\w+ = ", text, flags=re.MULTILINE)) > 20
    file = tmp_path / "inference.toml"
    file.write_text(text, encoding="utf-8")
    tomllib.loads(text)
    assert load_settings(file=file) == Settings()


def test_every_setting_is_in_it() -> None:
    text = settings_document()
    for path in known_paths():
        assert re.search(rf"^# {path.rpartition('.')[2]} =", text, flags=re.MULTILINE), path


def test_the_page_of_settings_lists_every_one_with_its_default() -> None:
    page = SHIPPED.with_name("README.md").read_text(encoding="utf-8")
    listed = page.partition("settings_table -->\n")[2].partition("<!-- end of settings -->")[0]
    assert listed == settings_table(), "write inference_tasks.settings.document.settings_table() to config/README.md"
    for path in known_paths():
        general = re.sub(r"^tiers\.\w+\.", "tiers.TIER.", path)
        assert f"| `{general}` |" in listed
