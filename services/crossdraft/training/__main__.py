"""`python -m crossdraft.training`: make the bundled models, one stage after the other.

Stages resume where they were stopped; a stage that is done is not done again.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.names import BUNDLED
from crossdraft.training.corpus import read_corpus
from crossdraft.training.data import TokenPool, tokenize, write_texts
from crossdraft.training.tokenizers import BUILDERS
from crossdraft.training.train import RECIPES, TARGET, Recipe, bits_per_byte, build_model, export, train

app = typer.Typer(help=__doc__, no_args_is_help=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="models to make; all if none is given")] = None,
    work: Annotated[Path, typer.Option(help="where checkpoints are kept")] = Path("build/models"),
    threads: Annotated[int, typer.Option(min=1, help="threads of one training process")] = 2,
    compiled: Annotated[bool, typer.Option(help="use torch.compile (needs a C++ compiler)")] = True,
) -> None:
    """Make the bundled models: the target first, then the drafters on text that the target wrote."""
    torch.set_num_threads(threads)
    for name in names or list(RECIPES):
        if name not in RECIPES:
            raise typer.BadParameter(f"no model {name!r}; there are {', '.join(RECIPES)}")
        make(RECIPES[name], work / name, work, compiled)


def make(recipe: Recipe, folder: Path, work: Path, compiled: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus()
    tokenizer = _tokenizer(recipe, folder)
    pool = tokenize(corpus.training, tokenizer, folder / "corpus.npz")
    written = None if recipe is TARGET else _written(work, tokenizer, folder / "written.npz")
    model = build_model(recipe, tokenizer)
    state = train(recipe, model, pool, written, folder, compiled)
    figure = bits_per_byte(model, tokenizer, corpus.held_out)
    print(f"{recipe.name}: {figure:.3f} bits per held-out byte after {state.seconds:.0f} s")
    export(recipe, model, tokenizer, BUNDLED / recipe.name, state.seconds, figure)


def _tokenizer(recipe: Recipe, folder: Path) -> PreTrainedTokenizerFast:
    if not (folder / "tokenizer.json").exists():
        texts = [document.text for document in read_corpus().training]
        BUILDERS[recipe.tokenizer](texts, recipe.vocabulary).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def _written(work: Path, tokenizer: PreTrainedTokenizerFast, cache: Path) -> TokenPool:
    target_tokenizer = _tokenizer(TARGET, work / TARGET.name)
    model = LlamaForCausalLM.from_pretrained(BUNDLED / TARGET.name, dtype=torch.bfloat16)
    pool = tokenize(read_corpus().training, target_tokenizer, work / TARGET.name / "corpus.npz")
    return tokenize(write_texts(model, target_tokenizer, pool, work / "written.jsonl"), tokenizer, cache)


if __name__ == "__main__":
    app()
