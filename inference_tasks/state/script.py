"""Loading and calling the Lua scripts; the place where Redis errors end."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Sequence
from functools import cache
from importlib import resources
from typing import Any, Protocol

from redis import exceptions

from inference_tasks.errors import BugError, DeploymentError, InferenceError, StateUnavailableError

__all__ = ["AsyncCommands", "Commands", "Script", "as_text", "load", "translated"]

_COUNTED = frozenset(
    {
        "bury",
        "cancel",
        "claim",
        "crashed",
        "dead_dropped",
        "depend",
        "dropped",
        "enlist",
        "finish",
        "forget_ready",
        "lift",
        "lower",
        "note_ready",
        "promoted",
        "release",
        "renew",
        "replayed",
        "retract",
        "submit",
        "submit_shared",
        "visited",
    }
)
"""The scripts that keep, or look at, counts and indices: ledger.lua stands before them too."""

_SUBMITS = frozenset({"depend", "submit", "submit_shared"})
"""The scripts that take work in: admission.lua stands before them as well."""

_ENDS = frozenset({"cancel", "claim", "crashed", "dropped", "enlist", "finish", "release", "visited"})
"""The scripts in which tasks end, or are found ended: others may wait for that, and batches count it.

batches.lua and dependents.lua stand before them as well.
"""

# not register_script(): its object converts and copies the arguments once more, and asks for the script's hash on
# each call's way. EVALSHA through execute_command costs half as much on the client's side.


class Commands(Protocol):
    """The one method that is used of ``redis.Redis``."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command and return its reply."""


class AsyncCommands(Protocol):
    """The one method that is used of ``redis.asyncio.Redis``."""

    def execute_command(self, *args: Any, **options: Any) -> Awaitable[Any]:
        """Send one command and return its reply."""


# Error replies that mean "not now" or "not this server". A write refused inside a script arrives as an error of the
# script, with the cause somewhere in its text.
_WAIT = re.compile(r"\b(LOADING|BUSY|TRYAGAIN|CLUSTERDOWN|MASTERDOWN|READONLY|OOM|MISCONF|NOREPLICAS)\b")
_RIGHTS = re.compile(r"\b(NOAUTH|WRONGPASS|NOPERM)\b")


def translated(error: exceptions.RedisError) -> InferenceError:
    """Return what a Redis error means for the caller, to be raised ``from`` it."""
    text = str(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError) or _RIGHTS.search(text):
        return DeploymentError(f"Redis refused the login or a right: {text}. Check the user and password of state.url.")
    is_bug = isinstance(error, exceptions.ResponseError | exceptions.DataError) and not isinstance(
        error, exceptions.ReadOnlyError
    )
    if is_bug and not _WAIT.search(text):
        return BugError(f"Redis refused a call of this package: {text}")
    return StateUnavailableError(text or type(error).__name__)


class Script:
    """One Lua script. Redis keeps it by its hash; it is sent again when Redis has forgotten it."""

    __slots__ = ("name", "sha", "source")

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    def call(self, client: Commands, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run the script in one round trip.

        Raises:
            StateUnavailableError: Redis could not be reached, gave no answer in time, or takes no writes now.
        """
        try:
            try:
                return client.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:
                client.execute_command("SCRIPT LOAD", self.source)
                return client.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
        except exceptions.RedisError as error:
            raise translated(error) from error

    async def call_async(self, client: AsyncCommands, keys: Sequence[str], args: Sequence[str | bytes | int]) -> Any:
        """Run the script in one round trip, on an asyncio client; raises as ``call`` does."""
        try:
            try:
                return await client.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:
                await client.execute_command("SCRIPT LOAD", self.source)
                return await client.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
        except exceptions.RedisError as error:
            raise translated(error) from error


@cache
def load(name: str) -> Script:
    """Read a script of this package, with what it shares with others before it."""
    folder = resources.files(__package__).joinpath("scripts")
    before = {"ledger": _COUNTED, "admission": _SUBMITS, "batches": _ENDS, "dependents": _ENDS}
    parts = ["prelude", *(part for part, names in before.items() if name in names), name]
    return Script(name, "".join(folder.joinpath(f"{part}.lua").read_text("utf-8") for part in parts))


def as_text(reply: Any) -> str:
    """Return a reply as text, whether or not the client decodes replies itself."""
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)
