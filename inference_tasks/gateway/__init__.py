"""The HTTP door: submit, wait, look up, follow. As a command, as an ASGI app, as a router for an app that exists."""

from inference_tasks.gateway.app import create_app, router
from inference_tasks.gateway.keys import ApiKey, KeyRing, new_key, read_keys

__all__ = ["ApiKey", "KeyRing", "create_app", "new_key", "read_keys", "router"]
