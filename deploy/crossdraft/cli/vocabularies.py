"""The tokenizer of a model by its name, without its weights."""

from dataclasses import dataclass

from crossdraft.cli.failures import CommandFailed
from crossdraft.models.names import ModelLoadError, source_of
from crossdraft.text.letters import Side
from crossdraft.text.loading import TokenizerMissing, load_tokenizer_json
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class Named:
    """A model's tokenizer."""

    name: str  # a folder, a hub id or a bundled model
    tokenizer_json: str  # the whole file
    tokenization: Tokenization

    @staticmethod
    def load(name: str, side: Side) -> "Named":
        """Raises CommandFailed if there is none, or it is of no supported kind."""
        try:
            loaded = load_tokenizer_json(source_of(name))
            vocabulary = Vocabulary.build(
                loaded.tokenizer_json, loaded.vocabulary_size, loaded.controls, loaded.stops, side
            )
            return Named(name, loaded.tokenizer_json, Tokenization(loaded.tokenizer_json, vocabulary))
        except (ModelLoadError, TokenizerMissing) as error:
            raise CommandFailed(str(error)) from error
        except ValueError as error:
            raise CommandFailed(f"the tokenizer of {name} cannot be used: {error}") from error
