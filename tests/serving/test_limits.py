"""Who may use an API, and how often."""

from pathlib import Path

import pytest

from crossdraft.config.api import RateOptions
from crossdraft.rpc.errors import KeyRefused
from crossdraft.serving.limits import MAX_CLIENTS, Keys, KeysError, Rates, scope_of

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@pytest.fixture
def keys() -> Keys:
    return Keys.of({"alice": ALICE, "bob": BOB})


@pytest.mark.parametrize("shown", [f"Bearer {ALICE}", f"bearer {ALICE}", f"BEARER  {ALICE} "])
def test_a_known_key_has_a_holder(keys: Keys, shown: str) -> None:
    assert keys.holder(shown) == "alice"


@pytest.mark.parametrize("shown", [None, "", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}"])
def test_who_shows_none_is_told_how(keys: Keys, shown: str | None) -> None:
    with pytest.raises(KeyRefused, match=r"an API key is needed: send it as `Authorization: Bearer KEY`"):
        keys.holder(shown)


@pytest.mark.parametrize("key", [ALICE[:-1], ALICE + "x", ALICE.upper(), "ä" * 20, "\udcff" * 20])
def test_an_unknown_key_is_refused_and_not_repeated(keys: Keys, key: str) -> None:
    with pytest.raises(KeyRefused, match="not known") as refused:
        keys.holder(f"Bearer {key}")
    assert key not in str(refused.value)


def test_without_keys_everybody_may_and_no_key_is_kept(keys: Keys) -> None:
    assert Keys().holder(None) == Keys().holder("Bearer whatever") == ""
    assert ALICE not in repr(keys)
    assert ALICE.encode() not in keys.holders


def test_who_has_the_same_key_and_salt_has_the_same_scope(keys: Keys) -> None:
    alice, bob = f"Bearer {ALICE}", f"bearer  {BOB} "
    scopes = [scope_of(shown, salt, keys) for shown in (alice, bob) for salt in ("", "a salt")]
    assert len(set(scopes)) == len(scopes)
    assert scope_of(f"bearer  {ALICE} ", "", keys) == scopes[0]
    assert scope_of(alice, "", Keys.of({"another name": ALICE})) == scopes[0]  # of another server
    assert not any(ALICE in scope or "alice" in scope for scope in scopes)
    # Without keys all have one, but for salts.
    assert scope_of(None, "", Keys()) == scope_of("Bearer EMPTY", "", Keys()) != scope_of(None, "a salt", Keys())


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"\ufeff# who may\n\nalice {ALICE}\n  bob\t{BOB}\n#carol 0123456789abcdef\n")
    keys = Keys.read(path)
    assert (keys.holder(f"Bearer {BOB}"), sorted(keys.holders.values())) == ("bob", ["alice", "bob"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no key"),
        ("# none\n", "has no key"),
        (f"alice {ALICE}\nbob\n", "line 2: write a name, a space and the key"),
        (f"alice {ALICE} more\n", "line 1: write a name"),
        (f"alice {ALICE}\nalice {BOB}\n", "line 2: 'alice' has a key already"),
        (f"alice {ALICE}\nbob {ALICE}\n", "'bob' has the same key as 'alice'"),
        ("alice short\n", "the key of 'alice' must be 16 or more"),
        ("alice 0123456789abcdefä\n", "visible ASCII"),
    ],
)
def test_a_file_that_cannot_be_used_says_what_to_change(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(KeysError, match=complaint) as refused:
        Keys.read(path)
    assert ALICE not in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("nowhere", "bytes"):
        with pytest.raises(KeysError, match="cannot read the API keys"):
            Keys.read(tmp_path / name)


def test_a_bucket_holds_a_burst_and_fills_at_its_rate() -> None:
    rates = Rates(RateOptions(rate=30, burst=3))
    assert [rates.take("a", 10.0) for _ in range(4)] == [0, 0, 0, pytest.approx(2.0)]
    assert rates.take("b", 10.0) == 0
    assert (rates.take("a", 11.0), rates.take("a", 12.0)) == (pytest.approx(1.0), 0)
    assert rates.take("a", 12.0) == pytest.approx(2.0)
    assert [rates.take("a", 1e6) for _ in range(4)] == [0, 0, 0, pytest.approx(2.0)]


def test_buckets_of_those_who_asked_long_ago_are_forgotten() -> None:
    rates = Rates(RateOptions(rate=1, burst=1))
    for client in range(MAX_CLIENTS + 1):
        assert rates.take(str(client), 0.0) == 0
    assert rates.take(str(MAX_CLIENTS), 0.0) > 0
    assert rates.take("0", 0.0) == 0
