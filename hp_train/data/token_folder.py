"""A folder of prepared tokens as it lies on disk: what `hp-train data prepare` writes and every reader checks first.

    tokens.bin      the ids back to back, little-endian uint8, uint16 or uint32
    documents.bin   where each document starts, little-endian uint64; one more entry than documents, the last is the end
    index.json      all there is to know without opening the others (`TokenIndex`)
    sources.json    name, size and sha256 of each input file
    tokenizer.json  a copy of the tokenizer, unless it is the byte tokenizer

May import errors only; never torch nor numpy: a config is checked against its data in milliseconds, before anything
starts. The folder appears under its name by one rename, so a folder that exists is whole, unless it was copied badly:
sizes are therefore checked at each read.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from hp_train.errors import ConfigError

FORMAT = "hp-train tokens"
VERSION = 1
TOKENS_FILE = "tokens.bin"
DOCUMENTS_FILE = "documents.bin"
INDEX_FILE = "index.json"
SOURCES_FILE = "sources.json"
TOKENIZER_FILE = "tokenizer.json"
TOKEN_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}
OFFSET_BYTES = 8


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer's ids mean. `size` counts special tokens; `sha256` is of the tokenizer file, None for bytes."""

    tokenizer: str
    sha256: str | None
    size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None


BYTE_VOCABULARY = Vocabulary(tokenizer="byte", sha256=None, size=259, bos_id=256, eos_id=257, pad_id=258)
"""Ids 0 to 255 are the bytes of UTF-8 text, then begin, end and padding."""


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """Contents of index.json. Counts are of tokens and documents, `longest_document` is in tokens, `max_token_id`
    is the largest id that occurs, `tokens_sha256` identifies the corpus, `sources_sha256` the list of inputs."""

    dtype: str
    num_tokens: int
    num_documents: int
    longest_document: int
    max_token_id: int
    vocabulary: Vocabulary
    tokens_sha256: str
    documents_sha256: str
    sources_sha256: str

    @classmethod
    def read(cls, path: str | Path, key: str = "data.path") -> TokenIndex:
        """Read and check the folder at `path`; `key` is the setting to name in errors.

        Raises ConfigError, one line, if it is missing, not a prepared folder, of another version, damaged or cut short.
        """
        folder = Path(path)
        setting = f"{key}={path}"
        text = _read_index_text(folder, setting)
        try:
            index = cls.from_json(text)
        except _WrongVersion as error:
            raise ConfigError(f"{setting}: {error}; prepare the data again") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{setting}: {INDEX_FILE} is damaged ({_in_one_line(error)}); prepare the data again"
            ) from None
        index._check_sizes(folder, setting)
        return index

    @classmethod
    def from_json(cls, text: str) -> TokenIndex:
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError for anything that `to_json` does not write."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f"it is not marked as {FORMAT!r}")
        version = fields.pop("version", None)
        if version != VERSION:
            raise _WrongVersion(f"format version {version}, this hp-train reads version {VERSION}")
        index = cls(**{**fields, "vocabulary": Vocabulary(**fields["vocabulary"])})
        index._check_fields()
        return index

    def to_json(self) -> str:
        """Text of index.json; the same index gives the same text."""
        fields = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(fields, indent=2) + "\n"

    def _check_fields(self) -> None:
        if self.dtype not in TOKEN_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(TOKEN_BYTES)}")
        counts = ("num_tokens", "num_documents", "longest_document", "max_token_id")
        for name, value in [(name, getattr(self, name)) for name in counts] + [("size", self.vocabulary.size)]:
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} {value!r} is not a count")

    def _check_sizes(self, folder: Path, setting: str) -> None:
        expected = {
            TOKENS_FILE: self.num_tokens * TOKEN_BYTES[self.dtype],
            DOCUMENTS_FILE: (self.num_documents + 1) * OFFSET_BYTES,
        }
        for name, num_bytes in expected.items():
            try:
                found = (folder / name).stat().st_size
            except OSError as error:
                raise ConfigError(f"{setting}: {name} cannot be read ({error.strerror})") from None
            if found != num_bytes:
                raise ConfigError(
                    f"{setting}: {name} holds {found:,} bytes where {INDEX_FILE} says {num_bytes:,}; "
                    "copy the folder again or prepare it again"
                )
        if self.num_tokens == 0:
            raise ConfigError(f"{setting} holds no tokens")


class _WrongVersion(ValueError):
    """The folder was written by another version of the format."""


def _read_index_text(folder: Path, setting: str) -> str:
    try:
        return (folder / INDEX_FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise ConfigError(f"{setting} does not exist") from None
        raise ConfigError(f"{setting} holds no prepared tokens; prepare it: {prepare_command(folder)}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {INDEX_FILE} is damaged (not text); prepare the data again") from None
    except OSError as error:
        raise ConfigError(f"{setting} cannot be read ({error.strerror})") from None


def prepare_command(source: Path) -> str:
    """The command that turns the text at `source` into a folder of tokens beside it."""
    out = source.with_name(source.name.split(".")[0] + "-tokens")
    return f"hp-train data prepare {shlex.quote(str(source))} --tokenizer byte --out {shlex.quote(str(out))}"


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
