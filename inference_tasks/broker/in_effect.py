"""What holds for a queue: its arguments together with the policy that applies to it, beside what is wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast

from inference_routing.topology import (
    SETTABLE_BY_POLICY,
    ArgumentValue,
    Difference,
    PolicySpec,
    QueueSpec,
    difference,
    differences,
)

__all__ = ["Policies", "by_queue", "compare", "definition_needed"]

# Where argument and policy both give a number, RabbitMQ takes the smaller one; of other arguments the queue's own.
_LOWEST_WINS = frozenset({"x-consumer-timeout", "x-delivery-limit", "x-max-length"})


class Policies:
    """The policies of a virtual host, as the management API lists them.

    Operators' policies are left out: whoever sets one means it to stand above all settings.
    """

    def __init__(self, listed: Mapping[str, Mapping[str, object]]) -> None:
        self._listed = listed

    def named(self, name: str) -> Mapping[str, object] | None:
        """Return the definition of a policy, None if there is none of that name."""
        policy = self._listed.get(name)
        return None if policy is None else cast("Mapping[str, object]", policy.get("definition") or {})

    def is_as_wanted(self, wanted: PolicySpec) -> bool:
        """Whether a policy exists just like this."""
        found = self._listed.get(wanted.name, {})
        return (
            found.get("definition") == dict(wanted.definition)
            and found.get("pattern") == wanted.pattern
            and found.get("priority") == wanted.priority
        )

    def applying_to(self, queue: str, queue_type: object) -> str | None:
        """Return the name of the one policy that the broker applies: the highest priority among those that match."""
        kinds = {"all", "queues", f"{queue_type}_queues"}
        matching = [
            (cast(int, policy.get("priority") or 0), name)
            for name, policy in self._listed.items()
            if policy.get("apply-to") in kinds and _matches(str(policy.get("pattern", "")), queue)
        ]
        return max(matching)[1] if matching else None


def compare(
    queue: QueueSpec, found: Mapping[str, object], wanted: PolicySpec | None, policies: Policies
) -> list[Difference]:
    """Compare what holds for an existing queue with what should, argument by argument.

    An argument that a policy has made as small as wanted is no difference. One that a policy could not undo later is,
    where the settings want it set by policy. A policy named after the queue counts as ours: what it sets beyond the
    settings is a difference; what somebody else's policy adds is not.

    Args:
        found: the arguments that the queue was declared with.
        wanted: the policy that the settings ask for, if they do.
    """
    by_policy: Mapping[str, ArgumentValue] = (
        {} if wanted is None else {f"x-{key}": value for key, value in wanted.definition.items()}
    )
    applying = policies.applying_to(queue.name, found.get("x-queue-type", "classic"))
    set_by_policy = {f"x-{key}": value for key, value in (policies.named(applying or "") or {}).items()}
    is_ours = applying == queue.name
    told = {one.argument: one for one in differences(queue, found)}
    for argument in sorted(SETTABLE_BY_POLICY):
        declared = found.get(argument)
        value = queue.arguments.get(argument, by_policy.get(argument))
        if argument in by_policy and argument in told:
            continue
        now = _in_effect(argument, declared, set_by_policy.get(argument))
        if now == value or (value is None and not is_ours and declared is None):
            told.pop(argument, None)
        elif argument not in told or now != declared:
            told[argument] = _difference(queue, argument, value, declared, now)
    return [told[argument] for argument in sorted(told)]


def definition_needed(
    queue: QueueSpec, found: Mapping[str, object], wanted: PolicySpec | None
) -> Mapping[str, ArgumentValue]:
    """Return what the queue's policy must say, where policies are enough to make a queue as wanted."""
    missing = {
        argument.removeprefix("x-"): value
        for argument, value in queue.arguments.items()
        if argument in SETTABLE_BY_POLICY and found.get(argument) != value
    }
    return missing | dict(wanted.definition if wanted is not None else {})


def by_queue(policies: Iterable[PolicySpec]) -> dict[str, PolicySpec]:
    """Return {queue: policy}; each of our policies is named after the one queue it is for."""
    return {policy.name: policy for policy in policies}


def _in_effect(argument: str, declared: object, by_policy: object) -> object:
    if declared is None:
        return by_policy
    if argument in _LOWEST_WINS and isinstance(declared, int) and isinstance(by_policy, int):
        return min(declared, by_policy)
    return declared


def _difference(
    queue: QueueSpec, argument: str, value: ArgumentValue | None, declared: object, now: object
) -> Difference:
    # Equal to the argument: taking the policy away is enough.
    can_policy = declared in (None, value) or difference(queue, argument, declared).by == "policy"
    found = now if now is None or isinstance(now, int) else str(now)
    return Difference(queue.name, argument, value, found, "policy" if can_policy else "new queue")


def _matches(pattern: str, queue: str) -> bool:
    try:
        return re.search(pattern, queue) is not None
    except re.error:
        # Erlang's expressions know forms that these do not.
        return False
