"""Celery's beat with the schedule in Redis: of any number of beats one sends, and another takes over when it is gone.

``celery-redbeat`` keeps the schedule. Its lock is used without its waiting: a beat that has to wait does so in its own
loop, where it can be stopped and notices a lost Redis; and one that has lost lock or schedule (a flushed Redis) writes
them again. The lock lives five times as long as the longest sleep, so a killed beat is replaced within half a minute.

Addresses come from the settings, not from Celery's configuration: that is shown to monitors, and passwords with it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import redis
from celery.beat import SchedulingError
from redbeat.schedulers import RedBeatConfig, RedBeatScheduler
from redis.exceptions import LockError, RedisError

from inference_tasks.app import inference_of
from inference_tasks.state import keys
from inference_tasks.state.store import plain_url

if TYPE_CHECKING:
    from celery import Celery

    from inference_tasks.settings import Settings

__all__ = ["Beat", "Scheduler"]

log = logging.getLogger(__name__)

#: The pause after an error that nobody foresaw, or while Redis is away.
PAUSE_S = 2.0
LOCK_SLEEPS = 5


class _Config(RedBeatConfig):  # type: ignore[misc]  # untyped
    """The settings of redbeat, from ours."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        # Not super(): it would take the broker for a Redis.
        self.app = app
        self.key_prefix = keys.beat(settings.state.prefix)
        self.schedule_key = f"{self.key_prefix}:schedule"
        self.statics_key = f"{self.key_prefix}:statics"
        self.redis_url = plain_url(settings.state.url or "")
        self.redis_use_ssl = None
        self.redbeat_redis_options: dict[str, object] = {}
        self.lock_key = keys.beat_lock(settings.state.prefix)
        self.lock_timeout = None


class Scheduler(RedBeatScheduler):  # type: ignore[misc]  # untyped
    """What ``app.conf.beat_scheduler`` names: for ``inference-tasks maintenance`` and ``celery beat`` alike.

    Attributes:
        is_leader: whether this beat sends; else another one does.
    """

    # Celery's beat and redbeat have no types.
    app: Any
    max_interval: float

    def __init__(self, app: Celery, **kwargs: Any) -> None:
        settings = inference_of(app).settings
        conf = _Config(app, settings)
        client = redis.Redis.from_url(
            conf.redis_url,
            decode_responses=True,
            socket_timeout=settings.state.socket_timeout_s,
            socket_connect_timeout=settings.state.socket_timeout_s,
        )
        # Where redbeat looks for them.
        app.redbeat_conf = conf  # type: ignore[attr-defined]
        app.redbeat_redis = client  # type: ignore[attr-defined]
        self._client = client
        self.is_leader = self._waits = False
        super().__init__(app, **kwargs)
        self.lock_timeout = max(1, int(self.max_interval * LOCK_SLEEPS))
        self._lock = client.lock(conf.lock_key, timeout=self.lock_timeout, thread_local=False)
        # Without it redbeat does not wait for its lock before the first tick.
        self.lock_key = None

    @property
    def producer(self) -> Any:
        """The app's own producer, which opens no connection of kombu's and tells what became of each message."""
        return self.app.amqp.Producer()

    def setup_schedule(self) -> None:
        """Nothing yet: only the beat that sends writes the schedule."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due; return how long to sleep."""
        try:
            if not self._leads():
                return min(self.max_interval, PAUSE_S)
            return float(super().tick(*args, **kwargs))
        except RedisError as exc:
            # Once, not at every try.
            log.log(logging.DEBUG if self._waits else logging.WARNING, "beat waits for Redis: %s", exc)
            self._waits, self.is_leader = True, False
            return PAUSE_S

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """Send one task; if the broker does not take it, its next turn comes."""
        try:
            return super().apply_async(entry, *args, **kwargs)
        except SchedulingError as exc:
            log.warning("%s", exc)
            return None

    def close(self) -> None:
        """Let another beat take over at once."""
        try:
            if self.is_leader:
                self.is_leader = False
                self._lock.release()
            super().close()
        except RedisError as exc:
            log.warning("beat could not give its lock back: %s", exc)
        self._client.close()

    def _leads(self) -> bool:
        if self.is_leader:
            try:
                self._lock.extend(self.lock_timeout, replace_ttl=True)
            except LockError:
                log.warning("beat has lost its lock in Redis")
                self.is_leader = False
        if not self.is_leader and self._lock.acquire(blocking=False):
            super().setup_schedule()
            self.is_leader, self._waits = True, False
            log.info("beat sends the schedule (lock for %d s)", self.lock_timeout)
        return self.is_leader


class Beat:
    """A beat in a thread of its own, inside the maintenance worker. An error ends a tick, never the thread."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inference-beat", daemon=True)

    def start(self) -> None:
        """Start to send."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop, and give the lock back."""
        self._ended.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        scheduler: Scheduler | None = None
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            try:
                scheduler = scheduler or Scheduler(self._app)
                pause_s = scheduler.tick()
            except Exception:
                # A beat that has ended is noticed by nobody.
                log.exception("beat goes on after an error")
                pause_s = PAUSE_S
        if scheduler is not None:
            scheduler.close()
