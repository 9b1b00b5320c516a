"""A pick that came to nothing leaves no trace."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from inference_routing.picker import Picker
from inference_routing.policy import Policy, default_policy
from tests.properties.test_share_by_count import ACTIONS, scramble
from tests.properties.worker_simulation import QUEUES, counting_policy

POLICIES = st.sampled_from([counting_policy(), default_policy()])


def future(picker: Picker) -> tuple[list[str], dict[str, float], list[str]]:
    """What the picker does from now on, with all that is ready and then with all queues."""
    ready = [key for key in QUEUES if picker.is_ready(key)]
    shares = picker.shares()
    orders = []
    for among in (ready, QUEUES):
        names = []
        for step in range(40 if among else 0):
            pick = picker.pick(1e6, among)
            assert pick is not None
            names.append(pick.key.name)
            if step % 3 == 0:
                picker.finished(pick, step / 100)
        orders.append(names)
    return orders[0], shares, orders[1]


@given(POLICIES, ACTIONS, st.integers(1, 12), st.randoms(use_true_random=False), st.lists(st.booleans(), max_size=12))
def test_picks_found_empty_or_refunded_leave_the_state_as_if_not_made(
    policy: Policy, actions: list[tuple[str, int]], count: int, random: Random, empties: list[bool]
) -> None:
    touched, untouched = Picker(policy, QUEUES), Picker(policy, QUEUES)
    for picker in (touched, untouched):
        scramble(picker, actions)
        picker.pick(1e5, QUEUES)  # brings the charge of what runs up to the same time
    ready = [key for key in QUEUES if touched.is_ready(key)]
    picks = [pick for _ in range(count) if (pick := touched.pick(1e5, ready)) is not None]
    random.shuffle(picks)
    for place, pick in enumerate(picks):
        if place % 2:
            touched.predicted(pick, 0.5)
        if place < len(empties) and empties[place]:
            touched.found_empty(pick)
            untouched.mark_empty(pick.key)
        else:
            touched.refund(pick)
    assert future(touched) == future(untouched)


@given(POLICIES, st.integers(1, 200))
def test_looking_into_an_empty_queue_again_and_again_costs_its_tier_nothing(policy: Policy, looks: int) -> None:
    fresh = tuple(key for key in QUEUES if key.lane == "fresh")
    looking, waiting = Picker(policy, fresh), Picker(policy, fresh)
    waiting.mark_empty(fresh[0])
    for _ in range(looks):
        pick = looking.pick(0.0, fresh)
        assert pick is not None
        if pick.key == fresh[0]:
            looking.found_empty(pick)
            pick = looking.pick(0.0, fresh[1:])
        other = waiting.pick(0.0, fresh[1:])
        assert pick is not None
        assert other is not None
        assert pick.key == other.key
        looking.finished(pick, 0.1)
        waiting.finished(other, 0.1)
