"""A model with a longer context, for measuring times: what it says after its own context means little."""

import json
import shutil
from pathlib import Path

from crossdraft.models.names import ModelLoadError, source_of

CONFIGURATION = "config.json"
CONTEXT = "max_position_embeddings"
KEPT = ("*.json", "*.safetensors", "*.jinja")


def lengthened(name: str, context: int, folder: Path) -> str:
    """The name of the same model with a context of at least `context` tokens: its own, or a copy in `folder`.

    Positions are rotary, so that none is without its angle.

    Raises:
        ModelLoadError: there is no such model, or its positions are learnt.
    """
    files = Path(source_of(name))
    if not (files / CONFIGURATION).is_file():
        raise ModelLoadError(f"the context of {name} cannot be lengthened: give a folder, or bundled:NAME")
    configuration = json.loads((files / CONFIGURATION).read_text(encoding="utf-8"))
    own = configuration.get(CONTEXT)
    if own is None or not {"rope_theta", "rope_parameters", "rope_scaling"} & configuration.keys():
        raise ModelLoadError(f"the context of {name} cannot be lengthened: its positions are not rotary")
    if own >= context:
        return name
    for pattern in KEPT:
        for file in files.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    changed = json.dumps(configuration | {CONTEXT: context}, indent=2)
    (folder / CONFIGURATION).write_text(changed, encoding="utf-8")
    return str(folder)
