"""A dashboard for Grafana; ``config/grafana/inference-tasks.json`` is generated from it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from inference_tasks.observe.panels import COLORS, ROWS, Panel

__all__ = ["dashboard", "dashboard_document"]

WIDTH = 24
HEIGHTS = {"stat": 4, "timeseries": 7}

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, object]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "inference-tasks",
        "title": "inference-tasks",
        "description": "Tiers, shares, waits, queues, workers and GPUs. Generated from the catalogue of metrics.",
        "tags": ["inference-tasks", "celery", "rabbitmq"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {"text": "Prometheus", "value": "prometheus"},
                    "hide": 0,
                    "includeAll": False,
                    "multi": False,
                    "options": [],
                    "refresh": 1,
                    "regex": "",
                }
            ]
        },
        "panels": list(_panels()),
    }


def dashboard_document() -> str:
    """Return ``config/grafana/inference-tasks.json``."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def _panels() -> Iterator[dict[str, object]]:
    number, top = 1, 0
    for row in ROWS:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
            "panels": [],
        }
        number, top = number + 1, top + 1
        width = WIDTH // len(row.panels)
        for place, panel in enumerate(row.panels):
            yield _panel(panel, number, {"h": HEIGHTS[panel.kind], "w": width, "x": place * width, "y": top})
            number += 1
        top += max(HEIGHTS[panel.kind] for panel in row.panels)


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
    defaults: dict[str, object] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "noValue": "–",
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.is_stacked else 0,
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
            "spanNulls": False,
            "showPoints": "auto",
            "thresholdsStyle": {"mode": "off" if panel.limit is None else "line"},
        }
    overrides = [
        {
            "matcher": {"id": "byName", "options": tier},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }
        for tier, color in COLORS.items()
        if panel.kind == "timeseries"
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": _SOURCE,
                "expr": target.expr,
                "legendFormat": target.legend,
                "range": panel.kind == "timeseries",
                "instant": panel.kind == "stat",
            }
            for position, target in enumerate(panel.targets)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": _options(panel),
    }


def _options(panel: Panel) -> dict[str, object]:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "background",
            "graphMode": "none",
            "textMode": "auto",
            "justifyMode": "auto",
            "orientation": "auto",
        }
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
