"""The application of `faulty_app`, in a worker that says which threads use the connections of its event loop."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from amqp.transport import TCPTransport  # noqa: TID251  # watched, not used

from tests.support.tier_app import OPTIONS_VARIABLE

FOREIGN = "a connection of the loop was used by"


def _watch(name: str) -> None:
    method = getattr(TCPTransport, name)

    def watched(self: TCPTransport, *args: Any, **kwargs: Any) -> Any:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            # Not print: a worker makes log lines of that, in pieces.
            assert sys.__stderr__ is not None
            sys.__stderr__.write(f"{FOREIGN} {thread.name}: {name}\n")
        return method(self, *args, **kwargs)

    setattr(TCPTransport, name, watched)


if OPTIONS_VARIABLE in os.environ:
    from tests.support import faulty_app

    app = faulty_app.app
    for _name in ("read_frame", "write"):
        _watch(_name)
