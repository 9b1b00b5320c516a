"""What lies in the queues of a broker, and what its workers hold, as the broker counts at this moment."""

from __future__ import annotations

from tests.support.servers import RabbitMQNode


def queues(node: RabbitMQNode, vhost: str) -> dict[str, tuple[int, int]]:
    """{queue: (ready, unacknowledged)}, as the broker counts at this moment."""
    listed = node.ctl("list_queues", "--vhost", vhost, "name", "messages_ready", "messages_unacknowledged", "--silent")
    rows = [line.split("\t") for line in listed.splitlines()]
    return {row[0]: (int(row[1]), int(row[2])) for row in rows if len(row) == 3 and row[1].isdigit()}


def parked(node: RabbitMQNode, vhost: str) -> tuple[int, int]:
    """How many messages lie in the delay queues, and how many of all queues a worker holds."""
    found = queues(node, vhost)
    delayed = sum(sum(counts) for name, counts in found.items() if "_celery_delayed_" in name)
    return delayed, sum(held for name, (_, held) in found.items() if "_celery_delayed_" not in name)
