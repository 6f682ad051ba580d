"""With drafters that are not trusted only methods are used that need no trust."""

import pytest

from crossdraft.session.resolution import SAFE, without_trust
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.request import GenerationRequest, RequestError
from crossdraft.verification.methods import METHODS


def test_the_methods_that_need_no_trust_are_those_whose_tokens_are_the_targets_own() -> None:
    assert SAFE == ("slem", "seeded")
    assert all(METHODS[name].samples and not METHODS[name].drafter_rows for name in SAFE)


@pytest.mark.parametrize(("temperature", "seed", "method"), [(0, None, "slem"), (1, None, "seeded"), (1, 5, "seeded")])
def test_the_default_is_one_of_them(temperature: float, seed: int | None, method: str) -> None:
    request = GenerationRequest("a", options=SamplingOptions(temperature), seed=seed)
    assert without_trust(request).method == method


@pytest.mark.parametrize("method", SAFE)
def test_they_may_be_asked_for(method: str) -> None:
    request = GenerationRequest("a", method=method)
    assert without_trust(request) is request


@pytest.mark.parametrize("method", sorted(METHODS.keys() - set(SAFE)))
def test_all_others_are_refused_with_what_may_be_used(method: str) -> None:
    with pytest.raises(RequestError, match=f"method '{method}' .* is not trusted; use 'slem' or 'seeded'"):
        without_trust(GenerationRequest("a", method=method, allow_inexact=True))
