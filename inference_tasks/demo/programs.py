"""Programs that the demo starts and surely ends again, with all that they have started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from inference_tasks.errors import DeploymentError

__all__ = ["Program", "find_program"]

_POLL_S = 0.02


class Program:
    """One program in a session of its own, its output in a file. Ctrl-C in the terminal does not reach it."""

    def __init__(
        self, argv: Sequence[str], *, log: Path, environment: Mapping[str, str], user: str | None = None
    ) -> None:
        self._argv = argv
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=None if user is None else log.parent,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                start_new_session=True,
            )

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until the program has said something.

        Raises:
            DeploymentError: it has ended, or did not say so in time; with the end of its output.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            has_ended = self._has_ended()
            said = self._log.read_text("utf-8", "replace")
            if text in said:
                return
            if has_ended or time.monotonic() > end_s:
                why = "ended" if has_ended else f"was not ready within {timeout_s:g} s"
                raise DeploymentError(f"{Path(self._argv[0]).name} {why}: {said.strip()[-2000:] or 'it said nothing'}")
            time.sleep(_POLL_S)

    def stop(self, patience_s: float = 5.0) -> None:
        """Ask the program to end, wait, and end by force what is left of it and of its children."""
        if self._process.returncode is not None:
            return
        # Not terminate(): it would wait for a program that has ended, whose group is then not ours to end.
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        end_s = time.monotonic() + patience_s
        while not self._has_ended() and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        self.kill()

    def kill(self) -> None:
        """End the program and its children at once."""
        if self._process.returncode is None:
            # Before it is waited for: afterwards the number could be that of somebody else's group.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def check(self) -> None:
        """Make sure that the program still runs.

        Raises:
            DeploymentError: it has ended.
        """
        if self._has_ended():
            said = self._log.read_text("utf-8", "replace").strip()[-2000:]
            raise DeploymentError(f"{Path(self._argv[0]).name} ended in the middle of the demo: {said}")

    def _has_ended(self) -> bool:
        # WNOWAIT: it stays a zombie, and its number ours, until kill().
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def find_program(name: str, *folders: str) -> str | None:
    """Return the path of an installed program; the system's folders count even if PATH lacks them."""
    places = [*folders, *os.environ.get("PATH", "").split(os.pathsep), "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return shutil.which(name, path=os.pathsep.join(places))
