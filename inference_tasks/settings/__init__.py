"""Settings of a deployment: the tree, and how it is read."""

from inference_tasks.settings.document import settings_document
from inference_tasks.settings.reading import CONFIG_VARIABLE, find_file, load_settings
from inference_tasks.settings.sections import (
    AgingSettings,
    BrokerSettings,
    FlowerSettings,
    GatewaySettings,
    MaintenanceSettings,
    RetrySettings,
    StateSettings,
    TierSettings,
    TiersSettings,
    WorkerSettings,
    masked,
)
from inference_tasks.settings.tree import SettingRow, Settings

__all__ = [
    "CONFIG_VARIABLE",
    "AgingSettings",
    "BrokerSettings",
    "FlowerSettings",
    "GatewaySettings",
    "MaintenanceSettings",
    "RetrySettings",
    "SettingRow",
    "Settings",
    "StateSettings",
    "TierSettings",
    "TiersSettings",
    "WorkerSettings",
    "find_file",
    "load_settings",
    "masked",
    "settings_document",
]
