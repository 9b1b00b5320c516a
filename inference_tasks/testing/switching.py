"""The part of the fake task store that keeps what operators have switched off."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_tasks.state.packing import clean
from inference_tasks.state.switches import OPERATOR_LOG_LENGTH, Action, OperatorLine, Switch, Switches
from inference_tasks.testing.cancelling import FakeCancelling

__all__ = ["FakeSwitching"]


@dataclass
class FakeSwitching(FakeCancelling):
    """Switches, and the log of those who set them."""

    _switched: dict[str, Switch] = field(default_factory=dict)
    _operators: list[OperatorLine] = field(default_factory=list)

    def switch(self, target: str, action: Action, *, by: str, because: str = "") -> Switch | None:
        """As ``TaskStore.switch``."""
        self._reach()
        target = clean(target)
        before = self._switched.get(target)
        self._switched[target] = Switch(target, Action(action), by, self.now_s, because)
        self.log_operator(action, target, by=by, because=because)
        return before

    def unswitch(self, target: str, *, by: str, because: str = "") -> Switch | None:
        """As ``TaskStore.unswitch``."""
        self._reach()
        before = self._switched.pop(clean(target), None)
        if before is not None:
            self.log_operator("resume", before.target, by=by, because=because)
        return before

    def switches(self) -> Switches:
        """As ``TaskStore.switches``."""
        self._reach()
        return Switches(dict(sorted(self._switched.items())))

    def log_operator(self, action: str, target: str, *, by: str, because: str = "") -> None:
        """As ``TaskStore.log_operator``."""
        self._reach()
        self._operators.insert(0, OperatorLine(self.now_s, by, str(action), target, because))
        del self._operators[OPERATOR_LOG_LENGTH:]

    def operator_log(self, limit: int = 100) -> list[OperatorLine]:
        """As ``TaskStore.operator_log``."""
        self._reach()
        return self._operators[:limit] if limit > 0 else []
