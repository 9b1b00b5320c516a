"""What tests, and Celery for them, change in a process for good: logging, the environment, the current app."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import celery._state
from _pytest.logging import LogCaptureHandler


@contextmanager
def process_as_it_was() -> Iterator[None]:
    """Put all of it back at the end.

    A worker in this process, as `celery.contrib.testing` starts it, sets the level of the root logger, becomes the
    current app, and tells the environment how processes started from here shall log.
    """
    state: Any = celery._state
    apps = state._tls.current_app, state.default_app
    environment = dict(os.environ)
    disabled_to = logging.root.manager.disable
    setups = {logger: _Setup.of(logger) for logger in _loggers()}
    yield
    state._tls.current_app, state.default_app = apps
    if environment != dict(os.environ):
        os.environ.clear()
        os.environ.update(environment)
    logging.disable(disabled_to)
    for logger in _loggers():
        setups.get(logger, _Setup(handlers=_handlers(logger))).apply(logger)


@dataclass(frozen=True)
class _Setup:
    """How a logger is set up; by default as a new one, save for its handlers: a library may bring one at its import."""

    handlers: tuple[logging.Handler, ...]
    level: int = logging.NOTSET
    propagate: bool = True
    is_disabled: bool = False

    @classmethod
    def of(cls, logger: logging.Logger) -> _Setup:
        return cls(_handlers(logger), logger.level, logger.propagate, logger.disabled)

    def apply(self, logger: logging.Logger) -> None:
        if logger.level != self.level:
            logger.setLevel(self.level)
        logger.propagate, logger.disabled = self.propagate, self.is_disabled
        if _handlers(logger) != self.handlers:
            of_pytest = [one for one in logger.handlers if isinstance(one, LogCaptureHandler)]
            logger.handlers[:] = [*self.handlers, *of_pytest]


def _handlers(logger: logging.Logger) -> tuple[logging.Handler, ...]:
    # Without those of pytest, which come and go with each phase of a test.
    return tuple(one for one in logger.handlers if not isinstance(one, LogCaptureHandler))


def _loggers() -> list[logging.Logger]:
    named = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(one for one in named if isinstance(one, logging.Logger))]
