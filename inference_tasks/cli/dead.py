"""``inference-tasks dead``: what has failed for good, and what to do about it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, TypeVar, cast

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from inference_tasks.app import Inference
from inference_tasks.cli.exit import INTERRUPTED
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.screen import Screen, clock_time
from inference_tasks.cli.status import record_view
from inference_tasks.dead_letters.filter import Filter
from inference_tasks.dead_letters.index import listed, refresh
from inference_tasks.dead_letters.revival import RATE_PER_S, Tally, find
from inference_tasks.dead_letters.revival import drop as drop_letters
from inference_tasks.dead_letters.revival import replay as replay_letters
from inference_tasks.errors import DeadLetterNotFoundError, DeadLettersBusyError, TaskNotFoundError
from inference_tasks.observe.switching import operator_name
from inference_tasks.state.records import DeadLetter, TaskRecord
from inference_tasks.worker.copies import raw_body

__all__ = ["dead"]

#: Of a body that cannot be read as a task's.
SHOWN_BYTES = 1000

F = TypeVar("F", bound=Callable[..., Any])

_CONDITIONS = (
    click.option("--task", metavar="PATTERN", help="Of tasks with this name; * and ? stand for any letters."),
    click.option("--reason", metavar="PATTERN", help="Dead for this reason, such as 'crash limit'; * and ? as above."),
    click.option("--tier", help="Served in this tier when they died."),
    click.option("--older-than", metavar="AGE", help="Dead for at least so long: 90s, 15m, 2h, 1d12h."),
    click.option("--younger-than", metavar="AGE", help="Dead for at most so long."),
    click.option("--id", "ids", multiple=True, metavar="ID", help="This one; may be given several times."),
)


def _conditions(function: F) -> F:
    for option in reversed(_CONDITIONS):
        function = option(function)
    return function


@click.group()
def dead() -> None:
    """List, show, replay and drop dead letters: the tasks and messages that have failed for good."""


@dead.command("list")
@_conditions
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="Show at most so many.")
@click.option("--refresh", "is_forced", is_flag=True, help="Read the queue first, even if it seems to be as listed.")
@command_options
def list_(invocation: Invocation, /, *, limit: int, is_forced: bool, **conditions: Any) -> None:
    """List dead letters, the newest first; all conditions given must hold."""
    wanted = Filter.of(**conditions)
    inference = invocation.inference
    _bring_up_to_date(inference, is_forced=is_forced)
    now_s = time.time()
    matching = (letter for letter in listed(inference) if wanted.matches(letter, now_s))
    found = list(islice(matching, limit))
    more = sum(1 for _ in matching)
    count = inference.store.dead_count()
    invocation.screen.show(
        {"count": count, "matching": len(found) + more, "letters": [letter.as_dict() for letter in found]},
        lambda: _table(found, more, now_s) if found else _nothing(count),
    )


@dead.command()
@click.argument("task_id", metavar="ID")
@click.option("--args", "with_args", is_flag=True, help="Show the task's arguments too; they may be private.")
@command_options
def show(invocation: Invocation, *, task_id: str, with_args: bool) -> None:
    """Show all that is known of the dead letter ID; exit code 3 if there is none."""
    inference = invocation.inference
    store = inference.store
    letter = store.dead_letter(task_id)
    if letter is None:
        _bring_up_to_date(inference)
        letter = store.dead_letter(task_id)
    if letter is None:
        raise DeadLetterNotFoundError(task_id)
    try:
        record = store.get(task_id)
    except TaskNotFoundError:
        record = None
    answer: dict[str, object] = {"letter": letter.as_dict(), "record": record.as_dict() if record else None}
    if with_args:
        found = find(inference, task_id)
        if found is None:
            raise DeadLetterNotFoundError(task_id)
        answer["message"] = _message(found[0])
    invocation.screen.show(answer, lambda: _letter_view(letter, record, answer))


@dead.command()
@_conditions
@click.option("--limit", type=click.IntRange(min=1), help="Replay at most so many, the oldest first.")
@click.option(
    "--rate", "rate_per_s", type=click.FloatRange(min=0, min_open=True), default=RATE_PER_S, show_default=True,
    metavar="PER_S", help="At most so many a second.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only count; nothing is changed.")
@click.option("--yes", is_flag=True, help="Do not ask before all of them are replayed.")
@command_options
def replay(
    invocation: Invocation, /, *, limit: int | None, rate_per_s: float, dry_run: bool, yes: bool, **conditions: Any
) -> None:
    """Let tasks run again, with their id, in the tier where they were last.

    They start anew: attempts and crashes count from zero, and a deadline that was given at the submit is gone. Ctrl-C
    ends the run after the letters it is at; what it did not come to stays a dead letter, and running it again goes on.
    """
    wanted = Filter.of(**conditions)
    inference = invocation.inference
    if wanted.is_open and limit is None and not dry_run and not yes:
        _confirm(f"Replay all {inference.store.dead_count()} dead letters?")
    run = replay_letters(inference, wanted, rate_per_s=rate_per_s, limit=limit, is_dry=dry_run)
    _carry_out(invocation, run, "would be replayed" if dry_run else "replayed", log_as="" if dry_run else "replay")


@dead.command()
@_conditions
@click.option("--limit", type=click.IntRange(min=1), help="Drop at most so many, the oldest first.")
@click.option("--dry-run", is_flag=True, help="Only count; nothing is changed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@command_options
def drop(invocation: Invocation, /, *, limit: int | None, dry_run: bool, yes: bool, **conditions: Any) -> None:
    """Delete dead letters for good; their tasks stay failed."""
    wanted = Filter.of(**conditions)
    inference = invocation.inference
    if not dry_run and not yes:
        now_s = time.time()
        _bring_up_to_date(inference)
        count = sum(1 for letter in listed(inference) if wanted.matches(letter, now_s))
        _confirm(f"Delete {count if limit is None else min(count, limit)} dead letters for good?")
    run = drop_letters(inference, wanted, limit=limit, is_dry=dry_run)
    _carry_out(invocation, run, "would be dropped" if dry_run else "dropped", log_as="" if dry_run else "drop")


def _bring_up_to_date(inference: Inference, *, is_forced: bool = False) -> None:
    try:
        refresh(inference, wait_s=1.0, is_forced=is_forced)
    except DeadLettersBusyError:
        Screen.tell("The dead letters are being replayed, dropped or read at the moment: this is the list so far.")


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nobody is there to be asked: add --yes.")
    click.confirm(question, abort=True, err=True)


def _carry_out(invocation: Invocation, run: Generator[Tally, None, None], what: str, *, log_as: str) -> None:
    inference = invocation.inference
    tally = Tally()
    # Closing lets the queue go: what was not decided returns to its place.
    with (
        closing(run),
        _stopping() as is_stopped,
        _bar(invocation.screen, inference.store.dead_count()) as advance,
    ):
        try:
            for tally in run:
                advance(tally)
                if is_stopped():
                    break
        finally:
            if "publisher" in vars(inference):
                inference.publisher.close()
    if log_as and tally.done:
        inference.store.log_operator(log_as, f"{tally.done} dead letters", by=operator_name())
    invocation.screen.show(tally.as_dict(), lambda: _said(tally, what))
    if is_stopped():
        Screen.tell("Stopped. What is left is where it was; the same command goes on.")
        click.get_current_context().exit(INTERRUPTED)
    if not tally.is_complete:
        Screen.tell("Not all letters were looked at: too many that do not match lie before them. Use other conditions.")


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C wait for the letters under way; a second one ends the program at once, which is safe too."""
    stopped: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(stopped)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(screen: Screen, total: int) -> Iterator[Callable[[Tally], None]]:
    if not screen.is_live:
        yield lambda _: None
        return
    columns = (TextColumn("dead letters"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("dead letters", total=total)

        def advance(tally: Tally) -> None:
            progress.update(bar, completed=tally.done + tally.already + tally.refused.total())

        yield advance


def _said(tally: Tally, what: str) -> Text:
    lines = [f"{tally.done} {what}"]
    if tally.already:
        lines.append(f"{tally.already} had been replayed before; only their letters were left")
    lines += [f"{count} not: {why}" for why, count in sorted(tally.refused.items())]
    return Text("\n".join(lines))


def _nothing(count: int) -> Text:
    return Text(f"None of the {count} dead letters matches." if count else "There are no dead letters.")


def _table(found: list[DeadLetter], more: int, now_s: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("id", "task", "tier", "reason"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "id")
    table.add_column("attempts", justify="right")
    table.add_column("age", justify="right")
    table.add_column("error", overflow="ellipsis", no_wrap=True)
    for letter in found:
        table.add_row(
            letter.id,
            letter.task or "-",
            letter.tier or "-",
            Text(letter.reason, style="" if letter.is_replayable else "yellow"),
            str(letter.attempts),
            _age(now_s - letter.dead_at_s),
            Text(_error(letter).replace("\n", " ")),
        )
    if more:
        table.caption = f"and {more} more (--limit)"
        table.caption_justify = "left"
    return table


def _error(letter: DeadLetter) -> str:
    return f"{letter.error['type']}: {letter.error['message']}" if letter.error else letter.detail


def _age(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f}{unit}"
    return f"{max(0.0, age_s):.0f}s"


def _letter_view(letter: DeadLetter, record: TaskRecord | None, answer: dict[str, object]) -> Table:
    view = Table(show_header=False, box=None, pad_edge=False)
    view.add_column(style="dim")
    view.add_column(overflow="fold")
    view.add_row("dead letter", f"{letter.task or 'no task'}  {letter.id}")
    view.add_row("reason", Text(letter.reason, style="red"))
    if letter.detail:
        view.add_row("detail", Text(letter.detail))
    if letter.error:
        view.add_row("last error", Text(_error(letter), style="red"))
    view.add_row("can be replayed", "yes" if letter.is_replayable else "no, it can never run")
    view.add_row("tier", f"{letter.tier or '-'}, lane {letter.lane or '-'} (submitted as {letter.tier_first or '-'})")
    view.add_row("attempts", f"{letter.attempts}  (failures {letter.failures}, crashes {letter.crashes})")
    view.add_row("generation", str(letter.generation))
    view.add_row("submitted", clock_time(letter.submitted_at_s))
    view.add_row("dead since", clock_time(letter.dead_at_s))
    view.add_row("record", record_view(record) if record else Text("none any more", style="dim"))
    for name, value in cast("dict[str, object]", answer.get("message", {})).items():
        view.add_row(name, Text(str(value)))
    return view


def _message(message: Any) -> dict[str, object]:
    try:
        payload = message.payload
        args, kwargs = payload[0], payload[1]
    except Exception:
        # Whatever keeps it from being read kept it from running; here its first bytes are of more use than why.
        return {"body": raw_body(message)[:SHOWN_BYTES].decode("utf-8", "backslashreplace")}
    return {"args": args, "kwargs": kwargs}
