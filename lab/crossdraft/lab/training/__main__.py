"""`python -m crossdraft.lab.training`: make the bundled models, one stage after the other.

Stages resume where they were stopped; a stage that is done is not done again.
"""

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training import eagle, train
from crossdraft.lab.training.chats import HELD_OUT, TEMPLATE, chat_rows
from crossdraft.lab.training.data import LENGTH_GROUPS, WRITTEN, Rows, read_corpus, tokenize, written
from crossdraft.lab.training.train import CHAT, RECIPES, TARGET, Progressed, Recipe

app = typer.Typer(help=__doc__, no_args_is_help=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="models to make; all if none is given")] = None,
    work: Annotated[Path, typer.Option(help="where checkpoints are kept")] = Path("build/models"),
    threads: Annotated[int, typer.Option(min=1, help="threads of one training process")] = 2,
) -> None:
    """Make the bundled models: the target first, what begins with it, and the drafters on text that it wrote."""
    torch.set_num_threads(threads)
    known = [*RECIPES, eagle.NAME]
    for name in names or known:
        if name not in known:
            raise typer.BadParameter(f"no model {name!r}; there are {', '.join(known)}")
        if name == eagle.NAME:
            eagle.make(work)
        else:
            make(RECIPES[name], work / name, work)


def make(recipe: Recipe, folder: Path, work: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Tokenizers stay as they are: how they were made of the corpus is in the history.
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        BUNDLED / (recipe.begins_with or recipe.name)
    )
    model = train.build_model(recipe, tokenizer)
    if recipe is CHAT:
        tokenizer.chat_template = TEMPLATE
        model.generation_config.update(do_sample=True, temperature=0.2)  # by default: it knows little but one answer
        chats = chat_rows(0, HELD_OUT // LENGTH_GROUPS, tokenizer, held_out=True)
        rows_of = partial(chat_rows, rows=recipe.rows, tokenizer=tokenizer)
        state = train.fit(recipe, model, rows_of, partial(train.judge_rows, model, chats), folder)
    else:
        state = _train_on_texts(recipe, model, tokenizer, folder, work)
    train.export(recipe, model, tokenizer, BUNDLED / recipe.name, state)


def _train_on_texts(
    recipe: Recipe, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, work: Path
) -> Progressed:
    corpus = read_corpus()
    pool = tokenize(corpus.training, tokenizer, folder / "corpus.npz")
    held_out = tokenize(corpus.held_out, tokenizer, folder / "held-out.npz")
    names = () if recipe is TARGET else WRITTEN
    texts = {
        name: tokenize(some := written(work, name), tokenizer, folder / f"{name}-{len(some)}.npz") for name in names
    }
    size = sum(len(document.text.encode()) for document in corpus.held_out)

    def measured() -> tuple[float, float]:
        agreement = train.judge(model, texts["greedy"])[1] if texts else 1.0
        return train.judge(model, held_out)[0] / size / math.log(2), agreement

    def rows_of(step: int) -> Rows:
        return train.rows_at(recipe, step, pool, texts.get("written"))

    return train.fit(recipe, model, rows_of, measured, folder)


if __name__ == "__main__":
    app()
