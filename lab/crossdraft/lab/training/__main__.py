"""`python -m crossdraft.lab.training`: make the bundled models, one stage after the other.

Stages resume where they were stopped; a stage that is done is not done again.
"""

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training.corpus import Document, read_corpus
from crossdraft.lab.training.data import ROUNDS, tokenize, write_texts
from crossdraft.lab.training.tokenizers import BUILDERS
from crossdraft.lab.training.train import RECIPES, TARGET, Recipe, build_model, export, judge, rows_at, train

WRITTEN = {"written": range(ROUNDS), "greedy": range(2, 3)}  # rounds of the target's texts; 2 is at temperature 0
app = typer.Typer(help=__doc__, no_args_is_help=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="models to make; all if none is given")] = None,
    work: Annotated[Path, typer.Option(help="where checkpoints are kept")] = Path("build/models"),
    threads: Annotated[int, typer.Option(min=1, help="threads of one training process")] = 2,
) -> None:
    """Make the bundled models: the target first, then the drafters on text that the target wrote."""
    torch.set_num_threads(threads)
    for name in names or list(RECIPES):
        if name not in RECIPES:
            raise typer.BadParameter(f"no model {name!r}; there are {', '.join(RECIPES)}")
        make(RECIPES[name], work / name, work)


def make(recipe: Recipe, folder: Path, work: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus()
    tokenizer = _tokenizer(recipe, folder)
    pool = tokenize(corpus.training, tokenizer, folder / "corpus.npz")
    held_out = tokenize(corpus.held_out, tokenizer, folder / "held-out.npz")
    names = () if recipe is TARGET else WRITTEN
    texts = {
        name: tokenize(some := written(work, name), tokenizer, folder / f"{name}-{len(some)}.npz") for name in names
    }
    size = sum(len(document.text.encode()) for document in corpus.held_out)
    model = build_model(recipe, tokenizer)

    def measured() -> tuple[float, float]:
        agreement = judge(model, texts["greedy"])[1] if texts else 1.0
        return judge(model, held_out)[0] / size / math.log(2), agreement

    state = train(recipe, model, lambda step: rows_at(recipe, step, pool, texts.get("written")), measured, folder)
    export(recipe, model, tokenizer, BUNDLED / recipe.name, state)


def _tokenizer(recipe: Recipe, folder: Path) -> PreTrainedTokenizerFast:
    folder = BUNDLED / recipe.name if recipe.trains_on else folder
    if not (folder / "tokenizer.json").exists():
        texts = [document.text for document in read_corpus().training]
        BUILDERS[recipe.tokenizer](texts, recipe.vocabulary).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def written(work: Path, name: str, rounds: int = ROUNDS) -> tuple[Document, ...]:
    """Texts by the target in `work`: `written` to learn from, `greedy` after held-out prompts to judge by."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / TARGET.name)
    model = LlamaForCausalLM.from_pretrained(BUNDLED / TARGET.name, dtype=torch.bfloat16)
    prompts = read_corpus().held_out if name == "greedy" else read_corpus().training
    pool = tokenize(prompts, tokenizer, work / f"{name}-prompts.npz")
    return write_texts(model, tokenizer, pool, work / f"{name}.jsonl", WRITTEN[name][:rounds])


if __name__ == "__main__":
    app()
