"""The part of the fake task store that tells all that is known around one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inference_tasks.state.records import WorkerBeat
from inference_tasks.state.scenes import NEEDS_SHOWN, Place, Scene
from inference_tasks.testing.switching import FakeSwitching

__all__ = ["FakeScenes"]


@dataclass
class FakeScenes(FakeSwitching):
    """Looks at one task."""

    _beats: dict[str, tuple[WorkerBeat, float]] = field(default_factory=dict)

    def workers(self) -> list[WorkerBeat]:
        """As ``TaskStore.workers``."""
        self._reach()
        live = [beat for beat, until_s in self._beats.values() if until_s > self.now_s]
        return sorted(live, key=lambda beat: (beat.seen_at_s, beat.node))

    def scene(self, task_id: str, queues: Sequence[str]) -> Scene | None:
        """As ``TaskStore.scene``."""
        self._reach()
        kept = self._kept.get(task_id)
        if kept is None:
            return None
        places = {}
        for queue in queues:
            index = sorted((at_s, one) for one, at_s in self._index(queue).items())
            ids = [one for _, one in index]
            ahead = ids.index(task_id) if task_id in ids else None
            places[queue] = Place(sum(at_s <= self.now_s for at_s, _ in index), ahead)
        needs = {}
        for one in kept.record.waits_for[:NEEDS_SHOWN]:
            need = self._kept.get(one)
            needs[one] = str(need.record.state) if need else ""
        return Scene(
            at_s=self.now_s,
            record=kept.record,
            switches=self.switches(),
            workers=tuple(self.workers()),
            letter=self._letters.get(task_id),
            places=places,
            needs=needs,
        )
