"""A plain connection for questions and declarations, opened at once or refused with a typed error."""

from __future__ import annotations

from kombu import Connection
from kombu.exceptions import OperationalError

from inference_tasks.errors import BrokerUnavailableError

__all__ = ["dial"]


def dial(url: str, connect_timeout_s: float) -> Connection:
    """Open a connection to the first address of ``url`` that answers.

    Raises:
        BrokerUnavailableError: none does.
    """
    connection = Connection(url, connect_timeout=connect_timeout_s)
    failures: tuple[type[BaseException], ...] = (OperationalError, *connection.connection_errors)
    try:
        # Not connect(): it waits two seconds before it tries the next address, or the only one once more.
        connection.ensure_connection(max_retries=max(1, len(connection.alt)), interval_start=0, interval_step=0)
    except failures as exc:
        connection.release()
        raise BrokerUnavailableError(str(exc) or type(exc).__name__) from exc
    return connection
