"""What a worker tells of each slot, as Celery signals; connected to in the module that holds the app.

Both are sent on the worker's main thread, between two tasks: a receiver must be quick, and what it raises is logged.

``slot_taken``: a task is being handed to the pool. ``slot_freed``: its slot is free again. Both bring ``task_id``,
``name``, ``tier`` (served), ``tier_first`` (submitted to), ``lane`` and ``at_s`` (the worker's monotonic clock,
seconds); ``slot_taken`` also ``held_s`` (seconds the message had waited inside the worker), ``slot_freed`` also
``cost_s`` (seconds the slot was in use).
"""

from celery.utils.dispatch import Signal

__all__ = ["slot_freed", "slot_taken"]

slot_taken = Signal(
    name="slot_taken", providing_args=["task_id", "name", "tier", "tier_first", "lane", "at_s", "held_s"]
)
slot_freed = Signal(
    name="slot_freed", providing_args=["task_id", "name", "tier", "tier_first", "lane", "at_s", "cost_s"]
)
