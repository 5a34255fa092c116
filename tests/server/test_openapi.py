"""The port keeps to its own description: statuses, content types and shapes, for requests made from it."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.server.app import create_app
from localspec.server.openapi import description
from localspec.server.settings import ServerSettings

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def app() -> object:
    engine = ScriptedEngine(Script((Reply("<think>t</think>Answer."),), context_limit_tokens=4000))
    return create_app(engine, ServerSettings(allowed_hosts=("testserver",)))


schema = schemathesis.openapi.from_dict(description())
schema.app = app()
# LM Studio's paths for what /v1 answers by the same functions; once is enough.
schema = schema.exclude(path_regex=r"^/api/v0/(chat/completions|completions|embeddings)$")


@schema.parametrize()
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_port_keeps_to_its_description(case: object) -> None:
    case.call_and_validate(checks=CHECKS)  # type: ignore[attr-defined]


def test_the_description_lists_what_is_served_and_nothing_else() -> None:
    described = {
        (path, method.upper())
        for path, item in description()["paths"].items()
        for method in item
        if method in ("get", "post")
    }
    served = {
        (route.path.replace(":path}", "}"), method)
        for route in create_app(ScriptedEngine()).routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }
    # The description says once for all that the prefix may be left out.
    aliases = {(path.removeprefix("/v1"), method) for path, method in described if path.startswith("/v1/")}
    assert described <= served
    assert served - described <= aliases


def test_the_description_says_what_surprises() -> None:
    fields = description()["components"]["schemas"]["ChatRequest"]["properties"]
    assert "0 and -1 mean" in fields["max_tokens"]["description"]
    assert fields["presence_penalty"] == {"type": "number", "minimum": -2, "maximum": 2}
