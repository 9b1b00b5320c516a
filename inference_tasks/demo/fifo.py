"""The other side of the comparison: the same task in stock Celery, everything in one queue."""

from __future__ import annotations

from typing import Any, cast

from celery import Celery
from celery.signals import worker_process_init

from inference_tasks.app import inference_of
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.demo import classifier
from inference_tasks.demo.tasks import app as tiers_app
from inference_tasks.models import Model
from inference_tasks.settings import Settings

__all__ = ["app", "classify", "queue_name"]

model = Model(classifier.load, "magika")
model.warmup(classifier.warm_up)


def queue_name(settings: Settings) -> str:
    """Return the name of the one queue, which is that of its exchange too."""
    return f"{settings.namespace}.fifo"


def _backend_url(settings: Settings) -> str:
    """Return the address of the state as stock Celery reads it."""
    url = cast(str, settings.state.url)
    for scheme in ("socket://", "unix://"):
        if url.startswith(scheme):
            return f"redis+socket://{url.removeprefix(scheme)}"
    return url


def _make_app() -> Celery:
    # The broker and Redis that the tiers use; so this module is imported only where they are known.
    settings = inference_of(tiers_app).settings
    prefix = {"global_keyprefix": f"{settings.namespace}:fifo:"}
    made = Celery("fifo", broker=settings.broker.url, backend=_backend_url(settings), set_as_current=False)
    cast(Any, made.conf).update(
        task_default_queue=queue_name(settings),
        result_backend_transport_options=prefix,
        broker_transport_options=prefix if is_embedded(settings.broker.url) else {},
        broker_connection_retry_on_startup=True,
    )
    return made


app = _make_app()


@app.task(name="fifo.classify", shared=False)
def classify(path: str, tier: str, number: int) -> dict[str, object]:
    """Tell what kind of file this is."""
    return classifier.classify(model(), path, tier, number)


@worker_process_init.connect(weak=False)
def _load_model(**_: object) -> None:
    # As with the tiers: loading counts against no task.
    model()
