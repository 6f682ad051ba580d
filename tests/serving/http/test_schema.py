"""Requests made from the OpenAPI document itself: none meets an error of the server or an undocumented reply."""

import json

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from crossdraft.serving.http import HttpOptions, make_app
from tests.conftest import FULL
from tests.serving.fakes import FakeBackend

EXAMPLES = 40 if FULL else 8  # of each operation
KEPT_TO = (checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance)
app = make_app(FakeBackend(), HttpOptions(metrics=lambda _: (b"", "text/plain")))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_no_request_meets_an_error_of_the_server(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error, *KEPT_TO])


def test_limits_have_the_names_of_json_schema() -> None:
    document = json.dumps(app.openapi())
    assert '"maximum": 1048576' in document
    assert not [name for name in ("ge", "gt", "le", "lt") if f'"{name}": ' in document]


def test_the_document_has_every_route() -> None:
    paths = app.openapi()["paths"]
    assert set(paths) == {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/{model}", "/tokenize",
        "/detokenize", "/health", "/ping", "/version", "/load", "/ready", "/metrics",
    }  # fmt: skip
    assert not any("422" in operation["responses"] for path in paths.values() for operation in path.values())
