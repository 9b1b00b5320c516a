"""The part of the state store that keeps what operators have switched off, and the log of what they did."""

from __future__ import annotations

import json

from inference_tasks.state import keys
from inference_tasks.state.calling import Calling
from inference_tasks.state.packing import clean
from inference_tasks.state.script import as_text
from inference_tasks.state.switches import (
    OPERATOR_LOG_LENGTH,
    Action,
    OperatorLine,
    Switch,
    Switches,
    read_switch,
    read_switches,
)

__all__ = ["Switching"]


class Switching(Calling):
    """Workers read the switches with each renewal, submits in the script that takes them in; see ``renew``, ``submit``.

    They are lost with the rest of Redis: then nothing is paused.
    """

    def switch(self, target: str, action: Action, *, by: str, because: str = "") -> Switch | None:
        """Set a switch in place of what its target had, and note it in the log; return what it had.

        Args:
            target: see ``Switch.target``; it need not exist.
            action: what happens to it.
            by: who wants it.
            because: why.
        """
        return self._switch(target, str(action), by, because)

    def unswitch(self, target: str, *, by: str, because: str = "") -> Switch | None:
        """Take a switch away, and note that in the log; return it, None if there was none (then nothing is noted)."""
        return self._switch(target, "", by, because)

    def _switch(self, target: str, action: str, by: str, because: str) -> Switch | None:
        names = (keys.switches(self.prefix), keys.operator_log(self.prefix))
        args = (clean(target), action, by, because, OPERATOR_LOG_LENGTH)
        before = as_text(self._call("switch", names, args))
        return read_switch(target, before) if before else None

    def switches(self) -> Switches:
        """Return all switches."""
        reply = self._call("switches", (keys.switches(self.prefix),))
        found = [as_text(one) for one in reply]
        return read_switches(dict(zip(found[::2], found[1::2], strict=True)))

    def log_operator(self, action: str, target: str, *, by: str, because: str = "") -> None:
        """Note something that an operator did; the log keeps the newest ``OPERATOR_LOG_LENGTH`` lines."""
        args = (action, target, by, because, OPERATOR_LOG_LENGTH)
        self._call("log_operator", (keys.operator_log(self.prefix),), args)

    def operator_log(self, limit: int = 100) -> list[OperatorLine]:
        """Return the newest lines of the operator log, the newest first."""
        if limit < 1:
            return []
        reply = self._call("operator_log", (keys.operator_log(self.prefix),), (limit,))
        return [_line(as_text(one)) for one in reply]


def _line(text: str) -> OperatorLine:
    said = json.loads(text)
    return OperatorLine(
        at_s=float(said["at_s"]),
        by=str(said["by"]),
        action=str(said["action"]),
        target=str(said["target"]),
        because=str(said["because"]),
    )
