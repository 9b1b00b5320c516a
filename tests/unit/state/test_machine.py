"""The table of state changes, and the diagram that shows it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from inference_tasks.state.machine import TRANSITIONS
from inference_tasks.state.records import END_STATES, State

README = Path(__file__).parents[3] / "routing" / "README.md"


def drawn() -> dict[State | None, set[State | None]]:
    """The arrows of the diagram; one from or to a group stands for all of its states."""
    (diagram,) = re.findall(r"```mermaid\nstateDiagram-v2\n(.*?)```", README.read_text(), re.DOTALL)
    groups = {name: body.split() for name, body in re.findall(r'state "[^"]*" as (\w+) \{([^}]*)\}', diagram)}
    arrows: dict[State | None, set[State | None]] = defaultdict(set)
    for before, after in re.findall(r"^ *(\S+) --> ([^\s:]+)", diagram, re.MULTILINE):
        for one in groups.get(before, [before]):
            arrows[_state(one)] |= {_state(other) for other in groups.get(after, [after])}
    return arrows


def _state(name: str) -> State | None:
    return None if name == "[*]" else State(name)


def test_the_diagram_shows_the_table() -> None:
    arrows = drawn()
    assert {before: arrows[before] for before in TRANSITIONS} == TRANSITIONS


def test_every_state_is_in_the_table_and_only_a_replay_leaves_an_end() -> None:
    assert set(TRANSITIONS) == {None, *State}
    assert {state for state in END_STATES if TRANSITIONS[State(state)]} == {State.FAILED}
    assert set().union(*TRANSITIONS.values()) == {None, *State}
