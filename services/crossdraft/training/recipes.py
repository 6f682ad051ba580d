"""What is trained: one frozen recipe for each bundled model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Everything that decides one bundled model, apart from the corpus and the seed."""

    name: str
    tokenizer: str  # a key of tokenizers.BUILDERS
    vocabulary: int  # ids, special tokens included
    width: int  # hidden size
    inner: int  # feed-forward size
    layers: int
    heads: int
    context: int  # tokens
    window: int  # tokens in a training row, until the last tenth of the steps (then `context`)
    rows: int  # training rows of `window` tokens in a step
    steps: int
    peak_rate: float  # learning rate after warm-up
    written_share: float  # share of the rows that the target wrote (distillation)


TARGET = Recipe("target", "byte-level", 4096, 256, 768, 6, 4, 1024, 512, 16, 1100, 3e-3, 0.0)
DRAFTER_A = Recipe("drafter-a", "sentencepiece", 2048, 256, 704, 2, 4, 512, 384, 16, 700, 4e-3, 0.6)
DRAFTER_B = Recipe("drafter-b", "byte-level-small", 2048, 256, 704, 2, 4, 512, 384, 16, 700, 4e-3, 0.6)
DRAFTER_C = Recipe("drafter-c", "bytes", 257, 128, 256, 3, 4, 1024, 768, 8, 450, 4e-3, 0.6)
RECIPES = {recipe.name: recipe for recipe in (TARGET, DRAFTER_A, DRAFTER_B, DRAFTER_C)}
SEED = 20251120
