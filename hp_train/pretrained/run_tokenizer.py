"""Which tokenizer a run's token ids are of. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hp_train.config.schema import TrainerConfig
from hp_train.data.index import tokenizer_of
from hp_train.data.token_folder import TOKENIZER_FILE
from hp_train.data.tokenizer import FileTokenizer, open_tokenizer
from hp_train.errors import ConfigError
from hp_train.pretrained.fit import directory
from hp_train.pretrained.hf_config import read_hf_config

BYTE = "byte"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True)
class RunTokenizer:
    """`name` is `byte`, a tokenizer.json, or None where the data has no text. `beside` is the directory of
    `model.pretrained` if the tokenizer is the one that lies there. `special_ids` are those of config.json."""

    name: str | None
    beside: Path | None
    special_ids: Mapping[str, int | None]


def tokenizer_of_run(config: TrainerConfig, given: str | None = None) -> RunTokenizer:
    """Return the tokenizer of the run's data, or `given` (byte or a file) in its place.

    Raises ConfigError when the data that would tell is gone.
    """
    name = given if given is not None else _of_data(config)
    pretrained = directory(config.model) if config.model.pretrained is not None else None
    if pretrained is not None and name is None and (pretrained / TOKENIZER_FILE).is_file():
        name = str(pretrained / TOKENIZER_FILE)
    if name is None:
        return RunTokenizer(None, None, dict.fromkeys(SPECIAL_IDS))
    vocabulary = open_tokenizer(name, "--tokenizer" if given is not None else "the run's tokenizer").vocabulary
    ids = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_id, "pad_token_id": vocabulary.pad_id}
    if pretrained is not None and _same_file(pretrained / TOKENIZER_FILE, vocabulary.sha256):
        content = read_hf_config(pretrained, f"model.pretrained={config.model.pretrained}")
        return RunTokenizer(name, pretrained, {key: content.get(key) for key in SPECIAL_IDS})
    return RunTokenizer(name, None, ids)


def _of_data(config: TrainerConfig) -> str | None:
    try:
        return tokenizer_of(config.data)
    except ConfigError as error:
        raise ConfigError(
            f"the run's data, which tells its tokenizer, is gone ({error}); use --tokenizer byte|FILE.json"
        ) from error


def _same_file(path: Path, sha256: str | None) -> bool:
    return sha256 is not None and path.is_file() and FileTokenizer(str(path)).vocabulary.sha256 == sha256
