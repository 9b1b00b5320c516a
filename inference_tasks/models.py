"""Expensive objects that each worker process loads once, before it gets a slot."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from celery import current_app, signals

from inference_tasks.celery_settings import AMQP_CLASS
from inference_tasks.errors import CallerError, ModelLoadError

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Model", "ModelDecorator", "load_all"]

T = TypeVar("T")
W = TypeVar("W")

log = logging.getLogger(__name__)

#: Exit status of a pool process that cannot load its models.
EX_NO_MODELS = 70

_NOT_LOADED = object()

_models: weakref.WeakSet[Model[Any]] = weakref.WeakSet()

# Objects loaded before a fork: unusable in the child (CUDA does not survive it), but destroying them there would
# release what still belongs to the parent.
_of_the_parent: list[object] = []


class Model(Generic[T]):
    """A handle on an object that is loaded once per process; calling it returns the object.

    Workers load and warm up every model of the app before a process takes its first task, so loading never counts
    against a task. Elsewhere the first call loads it, whichever thread makes it. After a fork the child loads again.
    """

    def __init__(self, load: Callable[[], T], name: str) -> None:
        self.name = name
        self._load = load
        self._warmups: list[Callable[[T], object]] = []
        self._lock = threading.RLock()
        self._object: T | object = _NOT_LOADED
        _models.add(self)

    def __repr__(self) -> str:
        return f"<Model {self.name} ({'loaded' if self.is_loaded else 'not loaded'})>"

    @property
    def is_loaded(self) -> bool:
        """Whether this process holds the object."""
        return self._object is not _NOT_LOADED

    def __call__(self) -> T:
        """Return the object, loading it first where that has not happened.

        Raises:
            ModelLoadError: loading or warming up failed; the next call tries again.
        """
        if self._object is _NOT_LOADED:
            with self._lock:
                if self._object is _NOT_LOADED:
                    self._object = self._loaded()
        return self._object  # type: ignore[return-value]

    def warmup(self, function: Callable[[T], W]) -> Callable[[T], W]:
        """Register a function that is called with the object right after loading, so that no task pays for it."""
        self._warmups.append(function)
        return function

    def _loaded(self) -> T:
        started_s = time.monotonic()
        try:
            loaded = self._load()
        except Exception as error:
            raise ModelLoadError(self.name, step="loading", reason=f"{type(error).__name__}: {error}") from error
        loaded_s = time.monotonic()
        for warm in self._warmups:
            try:
                warm(loaded)
            except Exception as error:
                raise ModelLoadError(self.name, step="warming up", reason=f"{type(error).__name__}: {error}") from error
        log.info(
            "Model %s loaded in %.2f s, warmed up in %.2f s (process %d)",
            self.name,
            loaded_s - started_s,
            time.monotonic() - loaded_s,
            os.getpid(),
        )
        return loaded

    def _forget_after_fork(self) -> None:
        # The lock may have been held by a thread that does not exist here.
        self._lock = threading.RLock()
        if self._object is not _NOT_LOADED:
            _of_the_parent.append(self._object)
            self._object = _NOT_LOADED


class ModelDecorator:
    """``@app.model``, bare or with a name; also the register of the app's models."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[Callable[[], Any], Model[Any]]] = {}

    def __iter__(self) -> Iterator[Model[object]]:
        """Iterate over the models in the order of their declaration."""
        return iter([model for _, model in self._by_name.values()])

    @overload
    def __call__(self, load: Callable[[], T], /) -> Model[T]: ...

    @overload
    def __call__(self, *, name: str | None = None) -> Callable[[Callable[[], T]], Model[T]]: ...

    def __call__(self, load: Callable[[], Any] | None = None, *, name: str | None = None) -> Any:
        """Turn a function that loads something into a handle on what it loads.

        Raises:
            CallerError: another function is registered under this name.
        """
        if load is not None:
            return self._register(load, name)
        return lambda load: self._register(load, name)

    def _register(self, load: Callable[[], T], name: str | None) -> Model[T]:
        name = name or load.__name__
        existing = self._by_name.get(name)
        if existing is not None and existing[0] is not load:
            raise CallerError(f"@app.model: there is a model of the name {name!r} already; choose another name=.")
        model = Model(load, name)
        self._by_name[name] = (load, model)
        return model


def load_all(celery_app: Celery) -> None:
    """Load and warm up all models of the app in this process; called by the worker before the process gets a slot.

    Raises:
        ModelLoadError: with the name of the model that failed.
    """
    # Not at the top: the app's module imports this one.
    from inference_tasks.app import inferences_named_like

    for inference in inferences_named_like(celery_app):
        for model in inference.model:
            model()


# Here, and not where the worker is: a process that was started anew (``spawn``) imports the app's module alone.
@signals.worker_process_init.connect(weak=False)
def _load_in_pool_process(**_: object) -> None:
    """Load the models in each pool process; one without its models must not get a slot.

    Celery logs what its signals raise and goes on, so the process is ended here.
    """
    if current_app.amqp_cls != AMQP_CLASS:
        return  # the worker of an app without tiers, which submits to one that has them
    try:
        load_all(current_app)
    except Exception:
        log.critical("this process ends, since it cannot load its models", exc_info=True)
        logging.shutdown()
        os._exit(EX_NO_MODELS)


def _after_fork_in_child() -> None:
    for model in list(_models):
        model._forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
