"""A plain connection for questions and declarations, opened at once or refused with a typed error."""

from __future__ import annotations

from kombu import Connection
from kombu.exceptions import OperationalError

from inference_tasks.errors import BrokerUnavailableError

__all__ = ["dial"]


def dial(
    url: str, connect_timeout_s: float, *, heartbeat_s: int = 0, answer_timeout_s: float | None = None
) -> Connection:
    """Open a connection to the first address of ``url`` that answers.

    Args:
        heartbeat_s: 0 for none; else the caller sees to it that the connection is used, or checked, that often.
        answer_timeout_s: longest wait for any one answer of the broker; None leaves it to the kernel.

    Raises:
        BrokerUnavailableError: none does.
    """
    options = {} if answer_timeout_s is None else {"read_timeout": answer_timeout_s, "write_timeout": answer_timeout_s}
    connection = Connection(url, connect_timeout=connect_timeout_s, heartbeat=heartbeat_s, transport_options=options)
    failures: tuple[type[BaseException], ...] = (OperationalError, *connection.connection_errors)
    try:
        # Not connect(): it waits two seconds before it tries the next address, or the only one once more.
        connection.ensure_connection(max_retries=max(1, len(connection.alt)), interval_start=0, interval_step=0)
    except failures as exc:
        connection.release()
        raise BrokerUnavailableError(str(exc) or type(exc).__name__) from exc
    return connection
