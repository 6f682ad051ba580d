"""Random texts and letters that provoke tokenizers."""

from hypothesis import strategies as st

from crossdraft.text.letters import Letters, Role, from_bytes

SNIPPETS = (
    *("the", " the", "there", "n't", "'", "'re", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "1", "1000", "0"),
    *("!", ".", "()", "naïve", "naï", "<tool_call>", "<tool", "_call>", "</s>", "<s>", "<|im_end|>", "<unk>", "<0x41>"),
    *("▁", "▁▁", "Ġ", "ÿ", "é", "e\u0301", "你好", "世界", "🦄", "🚀", "ﬁ", "İ", "\u200d", "\ufeff", "\x00"),
    *("aaaa", "abab", "print(", "<|fill_in|>"),
)
texts = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=4)), max_size=12).map("".join)
controls = st.sampled_from([Role.BEGIN_OF_SEQUENCE.letter, Role.END_OF_SEQUENCE.letter])
letters = st.lists(
    st.one_of(texts.map(lambda text: from_bytes(text.encode())), st.binary(max_size=5).map(from_bytes), controls),
    max_size=6,
).map(lambda parts: Letters("".join(parts)))
