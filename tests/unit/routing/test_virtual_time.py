from fractions import Fraction

from inference_routing.virtual_time import IDLE, Level, strides


def test_strides_are_the_smallest_whole_numbers_inverse_to_the_shares() -> None:
    assert strides({"a": Fraction(8, 11), "b": Fraction(2, 11), "c": Fraction(1, 11)}) == {"a": 1, "b": 4, "c": 8}
    assert strides({"only": Fraction(1)}) == {"only": 1}


def test_a_flow_re_enters_at_the_smallest_tag_of_the_active_ones() -> None:
    level = Level([1, 1])
    first, second = level.flows
    first.enter(1)
    first.charge(10, epoch=1)
    second.enter(2)
    assert level.tags == [10, 10]


def test_after_a_busy_period_all_begin_level() -> None:
    level = Level([1, 1])
    first, second = level.flows
    first.enter(1)
    second.enter(1)
    second.charge(7, epoch=1)
    first.leave()
    second.leave()
    assert level.tags == [IDLE, IDLE]
    first.enter(2)
    second.enter(2)
    assert level.tags == [7, 7]


def test_a_refund_of_work_from_before_an_idle_time_is_no_credit() -> None:
    level = Level([1, 1])
    first, second = level.flows
    first.enter(1)
    second.enter(1)
    first.charge(5, epoch=1)
    second.charge(50, epoch=1)
    first.leave()
    first.enter(2)
    first.charge(-4, epoch=1)
    assert level.tags == [50, 50]


def test_what_was_charged_before_an_idle_time_is_not_forgotten() -> None:
    level = Level([1, 1])
    first, second = level.flows
    first.enter(1)
    second.enter(1)
    first.charge(90, epoch=1)
    second.charge(50, epoch=1)
    first.leave()
    first.enter(2)
    assert level.tags == [90, 50]
    first.charge(-30, epoch=1)
    assert level.tags == [60, 50]
