"""Fields of a request that are of another type than they should be."""

from dataclasses import fields
from typing import Any

import pytest

from crossdraft.types.request import KINDS, GenerationRequest, RequestError


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"k": "5"}, "k must be a whole number, got '5'"),
        ({"k": None}, "k must be a whole number, got None"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
        ({"window": True}, "window must be a whole number, got True"),
        ({"audit": 1}, "audit must be True or False, got 1"),
        ({"prompt": b"x"}, "prompt must be a text, a tuple of token ids, or a Chat, got b'x'"),
        ({"method": 3}, "method must be the name of a method, got 3"),
        ({"drafter_temperature": "warm"}, "drafter_temperature must be a number"),
        ({"options": {"temperature": 0}}, "options must be SamplingOptions"),
        ({"stop": "end"}, "stop must be a tuple of texts, got 'end'"),
        ({"record": "file"}, "record must be a Path, got 'file'"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_the_field(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError) as raised:
        GenerationRequest(**{"prompt": "x"} | settings)
    assert str(raised.value).startswith(complaint)


def test_every_field_has_a_kind_that_its_default_is_of() -> None:
    assert {field.name for field in fields(GenerationRequest)} == {name for name, *_ in KINDS} | {"overlap"}
    GenerationRequest("x", drafter_temperature=1)
