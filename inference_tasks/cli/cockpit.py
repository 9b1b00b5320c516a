"""What is chosen on the screen of ``inference-tasks top``, and what its keys do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_tasks.errors import InferenceError
from inference_tasks.observe import switching
from inference_tasks.state.switches import tier_target, worker_target

if TYPE_CHECKING:
    from inference_tasks.app import Inference
    from inference_tasks.observe.top import Top

__all__ = ["Cockpit"]

_ACTIONS = {"p": "pause", "r": "resume", "d": "drain"}
_DONE = {"pause": "is paused", "resume": "is resumed", "drain": "takes nothing new"}
_BECAUSE = "in top"


@dataclass(slots=True)
class Cockpit:
    """The choice, the question that waits for an answer, and what was said last.

    A key that stops work asks first, so that a slip of the finger stops nothing. Whatever is done is a line in the
    operator log.

    Attributes:
        chosen: target of the row that keys act on, such as ``tier:batch`` or ``worker:gpu0-1a2b3c@host``.
        question: the action that waits for its ``y``; empty for none.
        message: what was done last, or why not.
    """

    inference: Inference
    chosen: str = ""
    question: str = ""
    message: str = ""

    @property
    def footer(self) -> str:
        """Return the line that tells which keys there are, or asks."""
        if self.question:
            return f"{self.question} {self.chosen}? y: yes, any other key: no"
        return "↑↓ or 1 2 3: choose   p: pause   r: resume   d: drain   q: quit"

    def press(self, key: str, top: Top | None) -> bool:
        """Do what a key says; false if it ends the program."""
        if self.question:
            action, self.question = self.question, ""
            if key == "y":
                self._do(action)
            return True
        if key in ("q", "escape"):
            return False
        targets = targets_of(top)
        if key in ("up", "k"):
            self._choose(targets, -1)
        elif key in ("down", "j"):
            self._choose(targets, 1)
        elif key in ("1", "2", "3") and len(targets) >= int(key):
            self.chosen = targets[int(key) - 1]
        elif key in _ACTIONS and self.chosen in targets:
            self.message = ""
            self.question = _ACTIONS[key]
        return True

    def _choose(self, targets: Sequence[str], step: int) -> None:
        if targets:
            at = targets.index(self.chosen) + step if self.chosen in targets else 0
            self.chosen = targets[max(0, min(at, len(targets) - 1))]

    def _do(self, action: str) -> None:
        act = {"pause": switching.pause, "resume": switching.resume, "drain": switching.drain}[action]
        try:
            was = act(self.inference, self.chosen, because=_BECAUSE)
        except InferenceError as exc:
            self.message = str(exc)
            return
        done = _DONE[action] if was is not None else "was neither paused nor drained"
        self.message = f"{self.chosen} {done}"


def targets_of(top: Top | None) -> list[str]:
    """Return the targets of all rows, from above to below."""
    if top is None:
        return []
    tiers = [tier_target(tier.tier) for tier in top.fleet.tiers]
    return [*tiers, *(worker_target(beat.node) for beat in top.fleet.workers)]
