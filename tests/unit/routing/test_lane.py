from inference_routing.lane import QueueKey, may_serve_reserved, reserved_queues
from tests.properties.worker_simulation import QUEUES


def test_a_reserved_slot_serves_realtime_fresh_and_returned_and_nothing_else() -> None:
    assert [key.name for key in reserved_queues(QUEUES)] == ["test.realtime.fresh", "test.realtime.returned"]


def test_a_fresh_lane_that_is_split_stays_reserved() -> None:
    assert may_serve_reserved(QueueKey("realtime", "fresh", "test.realtime.tenant-7"))
