"""The task class behind ``@app.inference``: an ordinary Celery task that can also be submitted by tier."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, Never, ParamSpec, TypeVar, overload

from inference_tasks.dependencies import Dependency, ids_of
from inference_tasks.errors import CallerError, UnknownOptionError
from inference_tasks.retries import RetryingTask, backoff_of, errors_of
from inference_tasks.routes import full_tier_name
from inference_tasks.sharing import WINDOW, DedupKey, dedup_key_of

if TYPE_CHECKING:
    from celery import Celery

    from inference_routing.backoff import Backoff
    from inference_tasks.client import Client
    from inference_tasks.handles import BatchSubmission, Call, TaskHandle

__all__ = ["InferenceDecorator", "InferenceTask", "SubmitOptions", "Submitter"]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """What can be said of one submit beside the arguments of the function.

    Attributes:
        tier: instead of the task's own; names and aliases.
        task_id: instead of a new one. Submitting one id twice is harmless: it runs once.
        timeout_s: seconds from now after which the caller is gone; the task is not started later than that.
        confirm_timeout_s: longest this submit may take, instead of ``broker.confirm_timeout_s``.
        tenant: for whom it is, up to 64 characters; a running task's own by default. Shown with the task, and what the
            HTTP gateway goes by.
        dedup: whether it joins an equal submit that has not ended; None leaves it to the task's own ``dedup``.
        idempotency_key: of the caller's making, 1 to 255 characters: for a day (``state.idempotency_ttl_s``) a submit
            under the same key, for the same tenant, gets the same task, and one with other arguments is refused.
        depends_on: ids of the tasks that must succeed before it starts; if one of them does not, it fails.
    """

    tier: str | None = None
    task_id: str | None = None
    timeout_s: float | None = None
    confirm_timeout_s: float | None = None
    tenant: str | None = None
    dedup: bool | None = None
    idempotency_key: str | None = None
    depends_on: tuple[str, ...] = ()

    def checked(self) -> SubmitOptions:
        """Return the options with the tier's full name.

        Raises:
            CallerError: a value that cannot be meant.
        """
        for name in ("timeout_s", "confirm_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise CallerError(f"{name}: expected a number of seconds above 0, found {value!r}.")
        if self.task_id is not None and not 0 < len(self.task_id) <= 255:
            raise CallerError(f"task_id: expected 1 to 255 characters, found {len(self.task_id)}.")
        if self.idempotency_key is not None and not 0 < len(self.idempotency_key) <= 255:
            raise CallerError(f"idempotency_key: expected 1 to 255 characters, found {len(self.idempotency_key)}.")
        if self.idempotency_key is not None and self.depends_on:
            raise CallerError("idempotency_key: a task with depends_on is not shared; give it a task_id of your own.")
        if self.tenant is not None and not re.fullmatch(TENANT, self.tenant):
            raise CallerError(f"tenant: expected up to 64 letters, digits and _.@-, found {self.tenant!r:.80}.")
        return replace(self, tier=full_tier_name(self.tier)) if self.tier is not None else self


#: What a tenant may be called.
TENANT = r"[A-Za-z0-9_.@-]{1,64}"

SUBMIT_OPTIONS = tuple(SubmitOptions.__dataclass_fields__)


class InferenceTask(RetryingTask[P, R]):
    """A Celery task with a tier.

    Called, it runs in place, like the function. ``delay``, ``apply_async``, ``s`` and the rest of Celery work on it;
    ``submit`` is the same with typed outcomes and without Celery's options.

    Attributes:
        tier: full name of its tier, None for the default tier.
        timeout_s: seconds from each submit after which it is not started any more, None for never.
        max_crashes: runs that may end without a report before it has failed, None for ``worker.max_crashes``.
        dedup: ``"window"`` if equal submits share one task, None if each is a task of its own.
        dedup_window_s: for how long after the first submit others join it.
        dedup_key: names of the arguments that make submits equal, or a function of them; None for all.
        reuse_result_s: for how long after its end a success is the answer to equal submits.
        lifts_canvas: whether the steps before it in a chain or chord run at its tier, if that is higher than theirs.
    """

    tier: str | None = None
    timeout_s: float | None = None
    max_crashes: int | None = None
    dedup: str | None = None
    dedup_window_s: float = 60.0
    dedup_key: DedupKey = None
    reuse_result_s: float = 0.0
    lifts_canvas: bool = False

    # By name: only a worker needs it.
    Request = "inference_tasks.worker.events:TierRequest"

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Submit one call with exactly the function's arguments, and return when the broker has stored it.

        Raises:
            InvalidArgumentsError, MessageTooLargeError: nothing was sent; the call must change.
            QueueFullError, DeadlineError, BrokerUnavailableError, StateUnavailableError: not accepted; try again later.
            DependencyUnknownError, DependencyFailedError, DependencyCycleError: what it depends on cannot come.
            IdempotencyConflictError: the key of the options was used for something else.
            OutcomeUnknownError: perhaps accepted; submitting the same ``task_id`` again is harmless.
        """
        return self.options().submit(*args, **kwargs)

    async def submit_async(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Submit one call from a coroutine; see ``submit``."""
        return await self.options().submit_async(*args, **kwargs)

    def submit_many(
        self,
        calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]],
        *,
        tier: str | None = None,
        timeout_s: float | None = None,
        confirm_timeout_s: float | None = None,
    ) -> BatchSubmission[R]:
        """Submit many calls in one go; see ``Submitter.submit_many``."""
        options = self.options(tier=tier, timeout_s=timeout_s, confirm_timeout_s=confirm_timeout_s)
        return options.submit_many(calls)

    async def submit_many_async(
        self,
        calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]],
        *,
        tier: str | None = None,
        timeout_s: float | None = None,
        confirm_timeout_s: float | None = None,
    ) -> BatchSubmission[R]:
        """Submit many calls from a coroutine; see ``Submitter.submit_many``."""
        options = self.options(tier=tier, timeout_s=timeout_s, confirm_timeout_s=confirm_timeout_s)
        return await options.submit_many_async(calls)

    def options(
        self,
        *,
        tier: str | None = None,
        task_id: str | None = None,
        timeout_s: float | None = None,
        confirm_timeout_s: float | None = None,
        tenant: str | None = None,
        dedup: bool | None = None,
        idempotency_key: str | None = None,
        depends_on: Iterable[Dependency | str] = (),
        **unknown: Never,
    ) -> Submitter[P, R]:
        """Return something to submit with, under these options: ``classify.options(tier="offline").submit("cat.png")``.

        ``depends_on`` takes handles or ids of tasks that must succeed first. Until they have, the task is ``waiting``;
        if one of them does not, it fails with ``DependencyFailedError``. Such a submit joins no equal one.

        Raises:
            UnknownOptionError: an option that does not exist, with the nearest one that does.
            UnknownTierError: a tier that does not exist.
        """
        for option in unknown:
            raise UnknownOptionError(option, SUBMIT_OPTIONS, where=f"{self.name}.options()")
        chosen = SubmitOptions(
            tier=tier,
            task_id=task_id,
            timeout_s=timeout_s,
            confirm_timeout_s=confirm_timeout_s,
            tenant=tenant,
            dedup=dedup,
            idempotency_key=idempotency_key,
            depends_on=ids_of(depends_on),
        )
        return Submitter(self, chosen.checked())


class Submitter(Generic[P, R]):
    """A task together with the options of a submit."""

    def __init__(self, task: InferenceTask[P, R], options: SubmitOptions) -> None:
        self._task = task
        self._options = options

    @property
    def _client(self) -> Client:
        # Not at the top: the app's module imports this one.
        from inference_tasks.app import inference_of

        return inference_of(self._task.app).client

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Submit one call; see ``InferenceTask.submit``."""
        return self._client.submit(self._task, args, kwargs, self._options)

    async def submit_async(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Submit one call from a coroutine, on whichever loop that runs; see ``InferenceTask.submit``."""
        return await self._client.submit_async(self._task, args, kwargs, self._options)

    def submit_many(self, calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]]) -> BatchSubmission[R]:
        """Submit many calls, all on their way at once, and report what became of each.

        Each item is a tuple of positional arguments, a mapping of keyword arguments, or a ``Call`` with both and an id.
        A call that is refused touches no other. Nothing is sent if any call does not fit the task.

        Raises:
            InvalidArgumentsError: a call that does not fit the signature or JSON; names its index.
        """
        return self._client.submit_many(self._task, calls, self._options)

    async def submit_many_async(
        self, calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]]
    ) -> BatchSubmission[R]:
        """Submit many calls from a coroutine; see ``submit_many``."""
        return await self._client.submit_many_async(self._task, calls, self._options)


class InferenceDecorator:
    """``@app.inference``, bare or with options."""

    def __init__(self, celery_app: Celery) -> None:
        self._celery_app = celery_app

    @overload
    def __call__(self, function: Callable[P, R], /) -> InferenceTask[P, R]: ...

    @overload
    def __call__(
        self,
        *,
        bind: None = None,
        tier: str | None = None,
        timeout_s: float | None = None,
        time_limit_s: float | None = None,
        soft_time_limit_s: float | None = None,
        max_attempts: int | None = None,
        max_crashes: int | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        backoff_s: Backoff | Sequence[float] | float | None = None,
        jitter: bool | None = None,
        name: str | None = None,
        ignore_result: bool | None = None,
        throws: tuple[type[Exception], ...] = (),
        autoretry_for: tuple[type[Exception], ...] = (),
        retry_backoff: bool | float | None = None,
        retry_backoff_max: int | None = None,
        retry_jitter: bool | None = None,
        rate_limit: str | None = None,
        dedup: Literal["window"] | None = None,
        dedup_window_s: float | None = None,
        dedup_key: DedupKey = None,
        reuse_result_s: float | None = None,
        lifts_canvas: bool | None = None,
        check_arguments: bool = True,
        **unknown: Never,
    ) -> Callable[[Callable[P, R]], InferenceTask[P, R]]: ...

    @overload
    def __call__(
        self,
        *,
        bind: bool,
        tier: str | None = None,
        timeout_s: float | None = None,
        time_limit_s: float | None = None,
        soft_time_limit_s: float | None = None,
        max_attempts: int | None = None,
        max_crashes: int | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        backoff_s: Backoff | Sequence[float] | float | None = None,
        jitter: bool | None = None,
        name: str | None = None,
        ignore_result: bool | None = None,
        throws: tuple[type[Exception], ...] = (),
        autoretry_for: tuple[type[Exception], ...] = (),
        retry_backoff: bool | float | None = None,
        retry_backoff_max: int | None = None,
        retry_jitter: bool | None = None,
        rate_limit: str | None = None,
        dedup: Literal["window"] | None = None,
        dedup_window_s: float | None = None,
        dedup_key: DedupKey = None,
        reuse_result_s: float | None = None,
        lifts_canvas: bool | None = None,
        check_arguments: bool = True,
        **unknown: Never,
    ) -> Callable[[Callable[Concatenate[InferenceTask[..., object], P], R]], InferenceTask[P, R]]: ...

    def __call__(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Turn a function into a task.

        Args:
            function: the function; given by the bare ``@app.inference``.
            options: see below.

        Options:
            * ``tier``: name or alias; by default the setting ``default_tier``.
            * ``timeout_s``: not started later than this after its submit.
            * ``time_limit_s``, ``soft_time_limit_s``: the longest a run may take; at the first its process is killed,
              at the second ``SoftTimeLimitExceeded`` is raised in it.
            * ``max_attempts``, ``max_crashes``: how many runs may fail, and how many may end without a report.
            * ``retry_on``: errors after which it is tried again, beside ``TemporaryError``, which always is, and
              ``PermanentError``, which never is. Others: the setting ``retry.other_errors``.
            * ``backoff_s``: delays between the tries: ``(1, 5, 30)``, the last of which repeats, or a ``Backoff``; by
              default the settings of section ``retry``. ``jitter``: whether chance lengthens them, by up to a quarter.
            * ``name``, ``bind`` (the task is the first argument), ``ignore_result``, ``throws``, ``autoretry_for``,
              ``retry_backoff``, ``retry_backoff_max``, ``retry_jitter``, ``rate_limit``: as in Celery.
            * ``dedup="window"``: an equal submit joins the first instead of running again, for ``dedup_window_s`` (60)
              seconds after it; equal are those with the same arguments, or the same of ``dedup_key``: ``("path",)``, or
              a function of the arguments. ``reuse_result_s``: how long after its end a success answers them too.
            * ``lifts_canvas``: the steps before it in a chain or chord run at its tier, if that is higher than theirs;
              not those of a canvas for which a tier was asked.
            * ``check_arguments``: against the signature, before anything is sent; on by default.

        Raises:
            UnknownOptionError: an option that does not exist, with the nearest one that does.
            UnknownTierError: a tier that does not exist.
            CallerError: a value that cannot be meant.
        """
        chosen = _task_options(options)
        # Lazy, as in Celery: nothing of the configuration is read before the task is used.
        create = partial(self._celery_app.task, base=InferenceTask, shared=False, follows_settings=True)

        def decorate(function: Callable[..., Any]) -> Any:
            if "dedup_key" in chosen:
                named = dedup_key_of(chosen["dedup_key"], function)
                # A function on the class would become a method of the task.
                chosen["dedup_key"] = staticmethod(named) if callable(named) else named
            return create(**chosen)(function)

        return decorate(function) if function is not None else decorate


_CELERY_NAMES: Mapping[str, str] = {
    "tier": "tier",
    "timeout_s": "timeout_s",
    "time_limit_s": "time_limit",
    "soft_time_limit_s": "soft_time_limit",
    "max_attempts": "max_attempts",
    "max_crashes": "max_crashes",
    "retry_on": "retry_on",
    "backoff_s": "backoff",
    "jitter": "jitter",
    "name": "name",
    "bind": "bind",
    "ignore_result": "ignore_result",
    "throws": "throws",
    "autoretry_for": "autoretry_for",
    "retry_backoff": "retry_backoff",
    "retry_backoff_max": "retry_backoff_max",
    "retry_jitter": "retry_jitter",
    "rate_limit": "rate_limit",
    "dedup": "dedup",
    "dedup_window_s": "dedup_window_s",
    "dedup_key": "dedup_key",
    "reuse_result_s": "reuse_result_s",
    "lifts_canvas": "lifts_canvas",
    "check_arguments": "typing",
}


def _task_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the decorator's options and give them the names that Celery knows."""
    chosen: dict[str, Any] = {}
    for option, value in options.items():
        if option not in _CELERY_NAMES:
            raise UnknownOptionError(option, _CELERY_NAMES, where="@app.inference")
        if value is None:
            continue
        if option == "backoff_s":
            value = backoff_of(value)
        elif option == "reuse_result_s" and value == 0:
            pass
        elif option == "dedup":
            if value != WINDOW:
                raise CallerError(f'@app.inference: dedup: expected "{WINDOW}" or None, found {value!r:.80}.')
        elif option == "dedup_key":
            value = dedup_key_of(value)
        elif option.endswith("_s") and not 0 < value < float("inf"):
            raise CallerError(f"@app.inference: {option}: expected a number of seconds above 0, found {value!r}.")
        if option in ("max_attempts", "max_crashes") and (not isinstance(value, int) or value < 1):
            raise CallerError(f"@app.inference: {option}: expected a whole number above 0, found {value!r}.")
        if option == "tier":
            value = full_tier_name(value)
        if option == "retry_on":
            value = errors_of(value)
        if option == "max_attempts":
            # Celery counts the tries after the first.
            chosen["max_retries"] = value - 1
        chosen[_CELERY_NAMES[option]] = value
    soft, hard = chosen.get("soft_time_limit"), chosen.get("time_limit")
    if soft is not None and hard is not None and soft > hard:
        raise CallerError(
            f"@app.inference: soft_time_limit_s: expected at most time_limit_s ({hard:g}), found {soft:g}."
        )
    return chosen
