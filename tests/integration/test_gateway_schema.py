"""What the OpenAPI document promises holds for whatever may be sent: schemathesis makes it up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.gateway import GatewayProcess, rig_of
from tests.support.servers import RabbitMQNode, RedisNode

pytestmark = pytest.mark.xdist_group("gateway-schema")

EXAMPLES = 40
# Named, so that a new release of schemathesis brings no new promise by itself.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
TASKS = ("add", "step.realtime", "total")
# schemathesis cannot write JSON lines; test_gateway_batches.py does.
NOT_WRITTEN = ("POST", "/v1/batches")


@pytest.fixture(scope="module")
def schema(rabbitmq: RabbitMQNode, redis_node: RedisNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # What prefers to wait waits for nothing here: there is no worker.
    options = {"gateway": {"wait_max_s": 0.1}, "tiers": {"realtime": {"bound": 10}}}
    with (
        rig_of(rabbitmq, redis_node, tmp_path_factory.mktemp("schema"), options) as rig,
        GatewayProcess.of(rig) as gateway,
    ):
        yield schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")


def test_the_document_is_what_it_says_to_be(schema: Any) -> None:
    schema.validate()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/tasks/{name}"),
        ("GET", "/v1/tasks/{task_id}"),
        ("DELETE", "/v1/tasks/{task_id}"),
        ("GET", "/v1/tasks/{task_id}/events"),
        ("GET", "/v1/tasks/{task_id}/why"),
        ("GET", "/v1/tiers"),
        ("GET", "/v1/overview"),
        ("GET", "/v1/batches/{batch_id}"),
        ("GET", "/v1/batches/{batch_id}/results"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
    ],
)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_whatever_is_sent_the_answer_is_one_of_those_promised(
    schema: Any, method: str, path: str, mode: schemathesis.GenerationMode
) -> None:
    cases = schema[path][method].as_strategy(generation_mode=mode)
    seen = set()

    @given(case=cases, task=st.sampled_from((None, *TASKS)))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    def ask(case: Any, task: str | None) -> None:
        if task is not None and "name" in case.path_parameters:
            case.path_parameters["name"] = task
        answer = case.call(timeout=30)
        seen.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    ask()
    assert seen


def test_every_operation_is_tried(schema: Any) -> None:
    marks = [
        one
        for one in test_whatever_is_sent_the_answer_is_one_of_those_promised.pytestmark
        if one.args[0] == ("method", "path")
    ]
    tried = set(marks[0].args[1])
    assert {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()} == {*tried, NOT_WRITTEN}
