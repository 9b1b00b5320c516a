"""A Chromium without a window, spoken to over a pipe by its DevTools protocol: no driver, no further package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.processes import LoggedProcess, environment, program
from tests.support.servers import MissingServerError

CHROMIUM = program("chromium") or program("chromium-browser") or program("google-chrome")
PATIENCE_S = 60.0
SCREENSHOTS_VARIABLE = "INFERENCE_TEST_SCREENSHOTS"
"""Names a folder in which tests leave pictures of the pages that they have looked at, for the documents."""

_FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root, and open pages of their own only
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# Chromium reads from 3 and writes to 4; where ours lie must be neither.
_LOWEST_FREE = 10


class Browser:
    """One tab.

    Attributes:
        complaints: what scripts have thrown, and what the page's policy or the network has refused.
    """

    def __init__(self, directory: Path) -> None:
        if CHROMIUM is None:
            raise MissingServerError("chromium")
        self._to, self._from = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, _LOWEST_FREE) for fd in (self._to[0], self._from[1])]
        for fd in theirs:
            os.set_inheritable(fd, True)
        flags = " ".join((*_FLAGS, f"--user-data-dir={directory / 'profile'}"))
        line = f"exec {CHROMIUM} {flags} about:blank 3<&{theirs[0]} 4>&{theirs[1]}"
        env = environment(directory, {"HOME": str(directory)})
        self._process = _Inheriting(("bash", "-c", line), log=directory / "chromium.log", env=env)
        self._theirs = theirs
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        self._process.start()
        for fd in (*self._theirs, self._to[0], self._from[1]):
            os.close(fd)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._process.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close()
        os.close(self._to[1])
        os.close(self._from[0])

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to[1], json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression in the page is true, and return it."""
        deadline = time.monotonic() + PATIENCE_S
        # Asked in the page at every frame, so that this waits for its answer only.
        asked = f"""new Promise((found) => {{
            const end = Date.now() + 5000;
            const look = () => {{ const value = {expression};
                if (value || Date.now() > end) found(value); else setTimeout(look, 20); }};
            look(); }})"""
        while not (value := self.value(asked)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.value('document.body.innerText')}"
        return value

    def screen(self, width: int, height: int, *, scheme: str = "light") -> None:
        """Take the size of a device, and a colour scheme."""
        narrow = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self) -> bytes:
        """The page as a PNG file."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def keep(self, name: str) -> bytes:
        """Take a screenshot, and leave it where the documents' pictures are made."""
        picture = self.screenshot()
        if folder := os.environ.get(SCREENSHOTS_VARIABLE):
            Path(folder, f"{name}.png").write_bytes(picture)
        return picture

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left_s = deadline - time.monotonic()
            readable = left_s > 0 and select.select([self._from[0]], [], [], left_s)[0]
            part = os.read(self._from[0], 1 << 16) if readable else b""
            assert part, f"Chromium does not answer:\n{self._process.log}"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.complaints.append(told["entry"]["text"])
        return message


class _Inheriting(LoggedProcess):
    """Keeps the descriptors that are marked as inheritable."""

    keeps_descriptors = True
