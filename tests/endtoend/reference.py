"""transformers' own `generate` on the target: what greedy and keyed output must be, token for token."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedTokenizerBase

from crossdraft.client import Generation
from crossdraft.engine.names import BUNDLED
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import NoiseKey, SamplingOptions
from crossdraft.verification.noise import KeyedNoise

GREEDY = SamplingOptions(temperature=0)
TIE = 1e-4  # two scores that are no further apart may come in either order, as floats add up differently in a batch


@dataclass(frozen=True)
class Case:
    """One continuation: of what, how long, how decided."""

    prompt: str
    tokens: int  # at most
    options: SamplingOptions = GREEDY
    stops: tuple[int, ...] = ()  # ids that end it, besides the model's own
    noise: "Noise | None" = None  # what is added to log-probabilities; None: greedy


class Penalties(LogitsProcessor):
    """vLLM's presence and frequency penalties, which transformers lacks."""

    def __init__(self, prompt_tokens: int, options: SamplingOptions) -> None:
        self._prompt_tokens = prompt_tokens
        self._options = options

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores (1, V) less what each id of the output costs."""
        counts = input_ids[0, self._prompt_tokens :].bincount(minlength=scores.shape[1])
        return scores - self._options.presence_penalty * (counts > 0) - self._options.frequency_penalty * counts


class Kept(LogitsProcessor):
    """Tokens that a grammar allows, each tried by itself with the library's own reading of the tokenizer."""

    def __init__(self, name: str, prompt_tokens: int, schema: str) -> None:
        self._prompt_tokens = prompt_tokens
        tokenizer = LLTokenizer((BUNDLED / name / "tokenizer.json").read_text())
        self._matcher, self._eos = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema)), tokenizer.eos_token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores (1, V), minus infinity where a token may not come."""
        self._matcher.reset()
        for token in input_ids[0, self._prompt_tokens :].tolist():
            assert self._matcher.is_stopped() or self._matcher.consume_token(token)
        kept = torch.full_like(scores, -torch.inf)
        for token in range(scores.shape[1]):
            if not self._matcher.is_stopped() and token != self._eos and self._matcher.validate_tokens([token]):
                kept[0, token] = scores[0, token]
        if self._matcher.is_accepting():
            kept[0, self._eos] = scores[0, self._eos]
        return kept


class Noise:
    """Gumbel noise of one key: with it, the greedy choice is a draw at temperature 1."""

    def __init__(self, vocabulary: Vocabulary, key: NoiseKey) -> None:
        ranks = [vocabulary.rank(token) for token in range(vocabulary.size)]
        self._source = KeyedNoise(vocabulary.letters, ranks)
        self._letters = vocabulary.letters
        self._key = key

    def at(self, output: list[int]) -> Tensor:
        """Float64 (V,), for the token after these."""
        offset = sum(len(self._letters[token]) for token in output)
        return -torch.from_numpy(self._source.exponentials(self._key, offset)).log()


class Noisy(LogitsProcessor):
    """Adds noise, which is that of the letters after the prompt."""

    def __init__(self, prompt_tokens: int, noise: Noise) -> None:
        self._prompt_tokens = prompt_tokens
        self._noise = noise

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores (1, V), normalized, and noise."""
        return scores.double().log_softmax(-1) + self._noise.at(input_ids[0, self._prompt_tokens :].tolist())


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """transformers' own tokenizer of a bundled model."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(BUNDLED / name)
    return tokenizer


class Reference:
    """The target by itself, in float32."""

    def __init__(self, name: str) -> None:
        self._name, self.tokenizer = name, tokenizer_of(name)
        self._model = AutoModelForCausalLM.from_pretrained(BUNDLED / name, dtype=torch.float32).eval()
        self.continuation = cache(self._continuation)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def log_probabilities(self, ids: list[int]) -> Tensor:
        """Of each id after these ids: (n, V)."""
        with torch.inference_mode():
            scores: Tensor = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return scores

    def check(self, case: Case, actual: list[int]) -> bool:
        """Fails if the output differs from `generate`'s. False after a tie, behind which nothing is compared.

        A tie: the other token's score, penalties and noise included, is less than TIE below the best one.
        """
        expected = self.continuation(case)
        differing = [place for place, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b]
        if not differing:
            assert len(actual) == len(expected), f"{len(actual)} tokens, not {len(expected)}, after {case.prompt!r}"
            return True
        place = differing[0]
        scores = self._scores(case, expected[:place])
        behind = float(scores.max() - scores[actual[place]])
        words = self.tokenizer.convert_ids_to_tokens([expected[place], actual[place]])
        assert behind <= TIE, f"token {place} after {case.prompt!r}: {words}, the second one {behind:.2g} nats behind"
        return False

    def same(self, cases: Sequence[Case], outputs: Sequence[Generation]) -> list[bool]:
        """`check` of each."""
        return [self.check(case, output.ids) for case, output in zip(cases, outputs, strict=True)]

    def _continuation(self, case: Case) -> list[int]:
        prompt = self.encode(case.prompt)
        output = self._generate(prompt, len(prompt), case, max_new_tokens=case.tokens)
        ids: list[int] = output.sequences[0, len(prompt) :].tolist()
        return ids

    def _scores(self, case: Case, before: list[int]) -> Tensor:
        """What `generate` takes the largest of, (V,), after these tokens of the output."""
        prompt = self.encode(case.prompt)
        output = self._generate(prompt + before, len(prompt), case, max_new_tokens=1)
        scores: Tensor = output.scores[0][0]
        return scores

    def _generate(self, ids: list[int], prompt_tokens: int, case: Case, max_new_tokens: int) -> Any:
        processors: list[LogitsProcessor] = [Penalties(prompt_tokens, case.options)]
        if case.options.grammar is not None:
            processors.append(Kept(self._name, prompt_tokens, case.options.grammar.text))
        ends = self._model.generation_config.eos_token_id
        ends = [*(ends if isinstance(ends, list) else [ends] * (ends is not None)), *case.stops]
        if case.options.min_tokens:
            processors.append(
                transformers.MinNewTokensLengthLogitsProcessor(prompt_tokens, case.options.min_tokens, ends)
            )
        allowed = list(case.options.allowed_token_ids)
        if case.noise is not None:
            processors.append(Noisy(prompt_tokens, case.noise))
        inputs = torch.tensor([ids])
        return self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            repetition_penalty=case.options.repetition_penalty,
            sequence_bias=[[[token], bias] for token, bias in case.options.logit_bias] or None,
            bad_words_ids=[list(word) for word in case.options.bad_word_ids] or None,
            prefix_allowed_tokens_fn=(lambda *_: allowed) if allowed else None,
            eos_token_id=ends or None,
            logits_processor=transformers.LogitsProcessorList(processors),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
