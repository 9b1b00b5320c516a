"""The part of the state store with which tasks are cancelled, and by which a run learns of it."""

from __future__ import annotations

from collections.abc import Sequence

from inference_tasks.state import keys, packing
from inference_tasks.state.calling import Calling
from inference_tasks.state.records import Cancellation, Run
from inference_tasks.state.script import as_text

__all__ = ["Cancelling"]


class Cancelling(Calling):
    """What is cancelled is remembered here, not in workers: what waits never runs, though no worker be there."""

    def cancel(self, wishes: Sequence[tuple[str, str]], *, terminate: bool = False) -> list[Cancellation]:
        """Cancel tasks, as (id, nonce); answers in the order of ``wishes``.

        What waits ends now, and whoever waits for its result learns it. What runs is asked to stop: its worker learns
        that with the next renewal, the run when it looks. A run whose worker is gone is not started again.

        Args:
            wishes: with the nonce of the submit that gives up its share in the task, which goes on while others have
                one; with an empty nonce the task ends for all of them.
            terminate: whether the process of one that runs is to be killed.
        """
        if not wishes:
            return []
        names = self._task_keys(task_id for task_id, _ in wishes)
        how = "terminate" if terminate else "stop"
        reply = as_text(self._change("cancel", names, (self._finished_ttl_s, how, *(nonce for _, nonce in wishes))))
        return [Cancellation(answer) for answer in reply.split(packing.RECORD)]

    def look(self, task_id: str, token: int) -> Run | None:
        """Tell a run how it stands, whose claim has this token; None where there is no record.

        It should stop if it was asked to, and also if its task has ended by another way or another worker has it.
        """
        return packing.unpack_run(self._call("running", (keys.task(self.prefix, task_id),), (token,)))
