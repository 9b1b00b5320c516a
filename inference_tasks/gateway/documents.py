"""The bodies of requests and answers: what they hold, and how they look in the OpenAPI document."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar, cast

from kombu.utils.json import loads
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_json

from inference_routing.tier import BATCH, OFFLINE, REALTIME
from inference_tasks.errors import LONGEST_DELAY_S, CallerError
from inference_tasks.gateway.problems import ProblemError
from inference_tasks.state.records import State, TaskRecord
from inference_tasks.task import SUBMIT_OPTIONS, TENANT

__all__ = [
    "BatchBody",
    "OverviewBody",
    "SubmitBody",
    "TaskBody",
    "TiersBody",
    "as_json",
    "read_body",
    "read_submit",
    "submit_schema",
    "task_body",
]

B = TypeVar("B", bound=BaseModel)

# The names that OpenAI's API has for service classes.
_TIER_BY_SERVICE_TIER = {"priority": REALTIME, "default": BATCH, "flex": OFFLINE, "auto": None}


class SubmitBody(BaseModel):
    """One call of a task."""

    model_config = ConfigDict(extra="forbid", strict=True)

    args: list[Any] = Field(default_factory=list, description="Arguments by position.", examples=[["cat.png"]])
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments by name.", examples=[{"size": 3}])
    tier: str | None = Field(
        None,
        description="realtime, batch or offline (P0, P1, P2). By default the task's own.",
        examples=["realtime"],
        max_length=32,
    )
    service_tier: Literal["priority", "default", "flex", "auto"] | None = Field(
        None, description="Another way to name the tier: realtime, batch, offline, or the task's own."
    )
    timeout_s: float | None = Field(
        None, gt=0, le=LONGEST_DELAY_S, description="Not started later than this many seconds from now.", examples=[30]
    )
    tenant: str | None = Field(
        None,
        pattern=f"^{TENANT}$",
        description="For whom; naming another tenant than the key's own is a right of its own.",
    )

    def chosen_tier(self) -> str | None:
        """Return the tier that is asked for, None for the task's own.

        Raises:
            CallerError: both names are given.
        """
        if self.service_tier is None:
            return self.tier
        if self.tier is not None:
            raise CallerError("tier and service_tier name the same thing; give one of them.")
        return _TIER_BY_SERVICE_TIER[self.service_tier]

    def further_options(self) -> dict[str, Any]:
        """Return the options of the submit that are fields of the same name and need no look of the gateway's."""
        return {name: value for name in _FURTHER if (value := getattr(self, name, None)) is not None}


# Accepted as soon as a submit has options of these names, refused as unknown before.
_OFFERED: dict[str, Any] = {
    "depends_on": (
        list[str] | None,
        Field(None, max_length=1000, description="Ids of tasks that must have succeeded before this one starts."),
    ),
    "dedup": (
        bool | None,
        Field(None, description="Whether a call like one that is under way joins it; by default as the task says."),
    ),
}
_FURTHER = {name: field for name, field in _OFFERED.items() if name in SUBMIT_OPTIONS}
_Body = cast("type[SubmitBody]", create_model("SubmitBody", __base__=SubmitBody, **_FURTHER))


def read_submit(value: object) -> SubmitBody:
    """Read the body of a submit.

    Raises:
        ProblemError: 422, naming each field that is wrong.
    """
    return read_body(_Body, value)


def read_body(kind: type[B], value: object) -> B:
    """Read a body of some kind.

    Raises:
        ProblemError: 422, naming each field that is wrong.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = [
            {"where": ".".join(map(str, one["loc"])), "message": one["msg"]}
            for one in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        said = "; ".join(f"{one['where']}: {one['message']}" if one["where"] else one["message"] for one in errors)
        raise ProblemError(
            422, "invalid-request", "The request cannot be meant", f"{said}.", extensions={"errors": errors[:20]}
        ) from error


def submit_schema() -> dict[str, object]:
    """Return the JSON schema of a submit's body."""
    return _Body.model_json_schema()


class Links(BaseModel):
    """Where to go on."""

    self: str
    events: str


class TaskErrorBody(BaseModel):
    """Why a task failed."""

    type: str
    message: str


class TaskBody(BaseModel):
    """A task: at the submit the first fields, later all of them. Times are unix seconds."""

    id: str
    task: str
    state: State
    tier: str = Field(description="The tier it is in; it may have moved up since the submit.")
    links: Links
    tier_first: str | None = None
    tenant: str | None = None
    attempts: int | None = None
    failures: int | None = None
    crashes: int | None = None
    submitted_at_s: float | None = None
    started_at_s: float | None = None
    finished_at_s: float | None = None
    expires_at_s: float | None = None
    due_at_s: float | None = None
    error: TaskErrorBody | None = None
    result: Any = Field(None, description="What the task returned, once its state is success.")
    retry_after_s: float | None = Field(None, description="When to ask again, while it has not ended.")
    why: str | None = Field(None, description="Why it is where it is, in a sentence; only with `?why=1`.")


class TierBody(BaseModel):
    """One tier at one moment."""

    tier: str
    ready: int
    ready_by_lane: dict[str, int]
    bound: int
    workers: int
    slots: int
    promised: float
    share: float | None
    share_by_origin: float | None
    started_per_s: float


class TiersBody(BaseModel):
    """All tiers."""

    tiers: list[TierBody]


class BatchLinks(BaseModel):
    """Where to go on."""

    self: str
    results: str


class BatchCounts(BaseModel):
    """How the accepted lines stand. A failed one that is replayed counts as failed until it ends again."""

    pending: int = Field(description="Not ended yet.")
    success: int
    failed: int
    cancelled: int
    expired: int
    dropped: int


class RefusedLines(BaseModel):
    """Lines in a row that were refused for the same reason."""

    first: int = Field(description="Number of the first line, from 1; empty lines do not count.")
    last: int
    problem: str = Field(description="The last part of the problem's type.")
    detail: str = Field(description="Of the first of them.")


class BatchBody(BaseModel):
    """A batch."""

    id: str
    state: Literal["uploading", "uploaded", "broken"] = Field(
        description="Broken: the client left before the end; what was accepted runs."
    )
    created_at_s: float
    lines: int
    accepted: int
    refused: int
    counts: BatchCounts
    links: BatchLinks
    refused_lines: list[RefusedLines] | None = Field(None, description="At the upload only.")
    is_cut: bool | None = Field(None, description="Whether there are more of these than are told.")


class RecentTask(BaseModel):
    """One of the latest tasks, without anything of its arguments."""

    id: str
    task: str
    state: State
    tier: str
    tier_first: str
    attempts: int
    submitted_at_s: float | None
    started_at_s: float | None
    finished_at_s: float | None
    error_type: str | None


class OverviewBody(BaseModel):
    """What the status page shows."""

    at_s: float
    tiers: list[TierBody]
    tasks: list[RecentTask] = Field(description="The latest that this gateway process has accepted.")


_SHOWN = (
    "tier_first",
    "tenant",
    "attempts",
    "failures",
    "crashes",
    "submitted_at_s",
    "started_at_s",
    "finished_at_s",
    "expires_at_s",
    "due_at_s",
    "error",
)


def task_body(record: TaskRecord, links: dict[str, str], document: str | None) -> dict[str, object]:
    """Return a task as clients see it.

    Args:
        document: Celery's result document, for a task that has succeeded.
    """
    body: dict[str, object] = {
        "id": record.id,
        "task": record.name,
        "state": record.state,
        "tier": record.tier,
        "links": links,
        **{name: getattr(record, name) for name in _SHOWN},
    }
    if document is not None and record.state == State.SUCCESS:
        # Celery's own reading: it knows the forms in which JSON carries dates and the like.
        body["result"] = loads(document).get("result")
    return body


def as_json(value: object) -> bytes:
    """Return any value as JSON; what JSON cannot say becomes null or text."""
    try:
        return to_json(value, inf_nan_mode="null", serialize_unknown=True, bytes_mode="base64")
    except ValueError:
        return json.dumps(value, default=str).encode()
