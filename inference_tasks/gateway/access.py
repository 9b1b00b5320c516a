"""Who asks, and may."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from fastapi import Request

from inference_tasks.gateway.keys import OPEN, ApiKey, KeyFile, KeyRing
from inference_tasks.gateway.limits import Rates
from inference_tasks.gateway.problems import ProblemError

__all__ = ["Access", "is_loopback", "tenant_for"]


class Access:
    """Finds out whose request it is."""

    def __init__(self, keys: KeyFile | KeyRing | None, *, is_open: bool) -> None:
        """Make it.

        Args:
            keys: who may ask; None for everybody on this machine.
            is_open: without keys, for everybody everywhere: something before the gateway decides who may ask.
        """
        self._keys = keys
        self._is_open = is_open
        self._rates = Rates()

    def authenticate(self, request: Request) -> ApiKey:
        """Return the key of a request.

        Raises:
            ProblemError: 401 or 403; or 429, it asks more often than it may.
        """
        if self._keys is None:
            if not self._is_open and not _is_local(request):
                raise ProblemError(403, "forbidden", "Not allowed", "Without API keys only this machine may ask.")
            return OPEN
        presented = _presented(request)
        key = self._keys.find(presented) if presented else None
        if key is None:
            detail = "This key is not known." if presented else "Send a key: Authorization: Bearer KEY, or X-API-Key."
            headers = {"WWW-Authenticate": "Bearer"}
            raise ProblemError(401, "unauthorized", "An API key is needed", detail, headers=headers)
        self._rates.take(key)
        return key


def tenant_for(key: ApiKey, named: str | None) -> str | None:
    """Return for whom a task is submitted.

    Raises:
        ProblemError: 403, the key may not name another tenant.
    """
    if named is None or named == key.tenant:
        return key.tenant
    if not key.may_name_tenants:
        raise ProblemError(403, "tenant-not-allowed", "This key may not name another tenant")
    return named


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _presented(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key", "").strip()


def _is_local(request: Request) -> bool:
    """Whether a request comes from this machine, and means it.

    The name in ``Host`` counts too: else a page in a browser here, whose name has been made to lead to this machine,
    could ask.
    """
    # A Unix socket has no client address.
    if request.client is not None and not is_loopback(request.client.host):
        return False
    try:
        name = urlsplit(f"//{request.headers.get('host', '')}").hostname
    except ValueError:
        return False
    return name is None or is_loopback(name)
