"""PrefixIndex against a search through all texts."""

from hypothesis import given
from hypothesis import strategies as st

from crossdraft.engine.kv_cache_manager import BLOCK, PrefixIndex


def blocks(one: list[int], other: list[int]) -> int:
    """First blocks that two texts have in common."""
    count = 0
    while len(one) >= (count + 1) * BLOCK <= len(other) and one[: (count + 1) * BLOCK] == other[: (count + 1) * BLOCK]:
        count += 1
    return count


@given(st.data())
def test_the_longest_is_found_whatever_came_and_went(data: st.DataObject) -> None:
    texts: dict[str, list[int]] = {}
    prefixes: PrefixIndex = PrefixIndex()
    part = st.sampled_from([[0] * BLOCK, [1] * BLOCK, [0] * 7, [1] * 40])
    for _ in range(data.draw(st.integers(1, 12))):
        owner = data.draw(st.sampled_from("abcd"))
        before = texts.get(owner, [])
        if data.draw(st.integers(0, 4)) == 0:
            prefixes.forget(owner)
            texts.pop(owner, None)
            continue
        kept = data.draw(st.integers(0, len(before)))
        texts[owner] = before[:kept] + [token for one in data.draw(st.lists(part, max_size=4)) for token in one]
        prefixes.note(owner, texts[owner], kept)
    asked = [token for one in data.draw(st.lists(part, max_size=5)) for token in one]
    most = max((blocks(text, asked) for text in texts.values()), default=0)
    found = prefixes.longest(asked)
    assert set(found) == {owner for owner in texts if most and blocks(texts[owner], asked) == most}
