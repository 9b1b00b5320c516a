"""Everything in the repository that is written by code: `make generated` writes it anew, tests keep it in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from inference_tasks.observe.dashboard import dashboard_document
from inference_tasks.observe.reference import reference_document
from inference_tasks.observe.rules import rules_document
from inference_tasks.settings import settings_document
from inference_tasks.settings.document import settings_table

ROOT = Path(__file__).parents[2]
TABLE = ("settings_table -->\n", "<!-- end of settings -->")


def page_of_settings() -> str:
    """`config/README.md` as it is, with the table of settings as it should be."""
    head, start, rest = (ROOT / "config/README.md").read_text(encoding="utf-8").partition(TABLE[0])
    _, end, tail = rest.partition(TABLE[1])
    return f"{head}{start}{settings_table()}{end}{tail}"


GENERATED: Mapping[str, Callable[[], str]] = {
    "config/README.md": page_of_settings,
    "config/grafana/inference-tasks.json": dashboard_document,
    "config/inference.toml": settings_document,
    "config/prometheus/rules.yml": rules_document,
    "docs/metrics.md": reference_document,
}


def main() -> None:
    """Write every file."""
    for path, document in GENERATED.items():
        (ROOT / path).write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
