"""One tokenizer of each kind for all tests of the text layer."""

import pytest

from crossdraft.text.tokenization import Tokenization
from tests.text.kinds import ALL, INJECTIVE, LOSSY, Kind, kind


@pytest.fixture(scope="session", params=list(ALL))
def any_kind(request: pytest.FixtureRequest) -> Kind:
    return kind(request.param)


@pytest.fixture(scope="session", params=list(INJECTIVE))
def injective(request: pytest.FixtureRequest) -> Tokenization:
    return kind(request.param).tokenization()


@pytest.fixture(scope="session", params=list(LOSSY))
def lossy(request: pytest.FixtureRequest) -> Tokenization:
    return kind(request.param).tokenization()
