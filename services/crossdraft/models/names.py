"""What a model's name means: a folder, a hub id or a bundled model. Without torch: some only want the tokenizer."""

from pathlib import Path

BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_PREFIX = "bundled:"


class ModelLoadError(ValueError):
    """A model cannot be loaded; the text says what to change."""


class NumberOutOfRangeError(ModelLoadError):
    """A number that was asked for does not fit this model or machine."""


def source_of(name: str) -> str:
    """The folder or hub id that a name means.

    Raises:
        ModelLoadError: there is no such bundled model or folder.
    """
    if name.startswith(BUNDLED_PREFIX):
        folder = BUNDLED / name.removeprefix(BUNDLED_PREFIX)
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"there is no bundled model {name!r}: there are {', '.join(bundled_names()) or 'none'}"
            )
        return str(folder)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise ModelLoadError(f"there is no folder {name}: give a folder, a hub id or {BUNDLED_PREFIX}<name>")
    return name


def bundled_names() -> list[str]:
    """The bundled models that are installed, with their prefix."""
    return sorted(BUNDLED_PREFIX + path.parent.name for path in BUNDLED.glob("*/config.json"))
