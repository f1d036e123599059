"""The HTTP API does what its own OpenAPI page says, whatever it is sent (schemathesis)."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS

from serving import running, template_service

pytestmark = pytest.mark.ci_cpu
NAMES = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
"""What the page does not promise is left out: it cannot say which sizes, seeds and controls the model takes."""


def test_no_request_makes_the_server_fail() -> None:
    service = template_service(requests_per_second=100_000, max_jobs=2, max_video_frames=40)
    with running(service.config, service) as server:
        schema: Any = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        for operation in operations:

            @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
            @given(case=operation.as_strategy())
            def answers_as_promised(case: Any) -> None:
                response = case.call(timeout=30)
                assert response.status_code < 500 or response.status_code in (503, 507), response.text
                case.validate_response(response, checks=[CHECKS.get_one(name) for name in NAMES])

            answers_as_promised()
        assert len(operations) == 11
        assert service.ready
