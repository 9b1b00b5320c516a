"""The life of a task: every change of its state that there is.

The scripts make these changes; the tests hold each one that happens on a real Redis against this table, and the diagram
in ``routing/README.md``.
"""

from __future__ import annotations

from collections.abc import Mapping

from inference_tasks.state.records import State

__all__ = ["TRANSITIONS"]

_ENDED = frozenset({State.SUCCESS, State.FAILED, State.CANCELLED, State.EXPIRED})
"""How any task may end. ``dropped`` is different: only what lies in a queue can be."""

TRANSITIONS: Mapping[State | None, frozenset[State | None]] = {
    # After a loss of Redis whatever is next heard of a task makes its record.
    None: _ENDED | {State.PENDING, State.WAITING, State.PROCESSING, State.RETRYING},
    State.WAITING: _ENDED | {State.PENDING, State.PROCESSING, State.RETRYING, None},
    State.PENDING: _ENDED | {State.PROCESSING, State.RETRYING, State.DROPPED, None},
    State.PROCESSING: _ENDED | {State.PENDING, State.RETRYING},
    State.RETRYING: _ENDED | {State.PENDING, State.PROCESSING, State.DROPPED},
    # A replay is the task's next life; its message may be claimed before the replay is noted.
    State.FAILED: frozenset({State.PENDING, State.PROCESSING, State.EXPIRED}),
    State.SUCCESS: frozenset(),
    State.CANCELLED: frozenset(),
    State.EXPIRED: frozenset(),
    State.DROPPED: frozenset(),
}
"""{state before: states after}. None is no record: not there yet, or taken back since the broker refused the message;
that records are forgotten at the end of their days is no change. A run that a dead worker left behind is taken over
within ``processing``."""
