"""The fifty prompts of `tests/prompts.jsonl`: text that no bundled model has seen. Their licence: PROMPTS_LICENSE.

Each is of 120 to 1,200 characters from the start of a line on; by turns they end where a line ends, or in mid-line
where a writer might pause.
"""

from pathlib import Path

from crossdraft.cli.prompts import texts_of

FILE = Path(__file__).with_name("prompts.jsonl")
PROMPTS = texts_of(FILE)
