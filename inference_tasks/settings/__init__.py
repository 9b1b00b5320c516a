"""Settings of a deployment: the tree, and how it is read."""

from inference_tasks.settings.reading import load_settings
from inference_tasks.settings.tree import (
    BrokerSettings,
    Settings,
    StateSettings,
    TierSettings,
    TiersSettings,
    WorkerSettings,
)

__all__ = [
    "BrokerSettings",
    "Settings",
    "StateSettings",
    "TierSettings",
    "TiersSettings",
    "WorkerSettings",
    "load_settings",
]
