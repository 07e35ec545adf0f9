"""What a run's data section refers to, known before anything starts: sizes, vocabulary, and whether a run fits it.

May import errors, `data.token_folder` and `data.shakespeare`; never torch nor numpy. Reads index files only, no tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hp_train.data import shakespeare
from hp_train.data.token_folder import BYTE_VOCABULARY, TOKENIZER_FILE, TokenIndex
from hp_train.errors import ConfigError

SOURCES = ("shakespeare", "tokens", "random")


class DataConfig(Protocol):
    """The `data` section of a config, as far as it is read here."""

    name: str
    path: str | None
    val_path: str | None
    tokenizer: str
    document_boundaries: str


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What the data section refers to.

    Token counts are None where there is no end (random). `vocab_size` is the tokenizer's, special tokens included, and
    `max_token_id_bound` the largest id that occurs; both None for random, which follows the model. `longest_document`
    is in tokens. `fingerprint` changes with any token of either part. `tokenizer` is its name, None where there is no
    text; `tokenizer_sha256` is of its file, None for bytes.
    """

    name: str
    num_train_tokens: int | None
    num_val_tokens: int | None
    vocab_size: int | None
    max_token_id_bound: int | None
    longest_document: int | None
    fingerprint: str
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None

    def faults(self, *, seq_len: int, vocab_size: int, document_boundaries: str, evaluates: bool) -> list[str]:
        """One line for each reason why a run with these settings, evaluating or not, cannot read this data."""
        if self.num_train_tokens is None or self.max_token_id_bound is None:
            return []
        found = []
        if evaluates and self.num_val_tokens is not None and self.num_val_tokens < 2:
            found.append(
                f"data={self.name}: {self.num_val_tokens} validation tokens leave nothing to predict; "
                "set data.val_path, or trainer.eval_every=0"
            )
        if self.max_token_id_bound >= vocab_size:
            found.append(
                f"model.vocab_size={vocab_size} is too small: data={self.name} holds token id "
                f"{self.max_token_id_bound}; use {self.max_token_id_bound + 1} or more"
            )
        if document_boundaries == "pad":
            if self.longest_document is not None and self.longest_document < 2:
                found.append(f"data={self.name}: no document is longer than one token, which leaves nothing to predict")
        elif self.num_train_tokens <= seq_len:
            found.append(
                f"trainer.seq_len={seq_len} is longer than the data: {self.num_train_tokens:,} training tokens; "
                f"use {self.num_train_tokens - 1} or less"
            )
        return found


def num_held_out_tokens(num_tokens: int) -> int:
    """Tokens at the end of a corpus that are for validation where no other text is given: a tenth."""
    return num_tokens - num_tokens * 9 // 10


def describe_source(config: DataConfig) -> SourceInfo:
    """Describe what `config` refers to, from index files alone. Raises ConfigError, one line for each fault."""
    if config.name == "shakespeare":
        return _describe_shakespeare(config)
    if config.name == "tokens":
        return _describe_tokens(config)
    if config.name == "random":
        return SourceInfo("random", None, None, None, None, None, "random")
    raise ConfigError(f"data.name={config.name} is unknown; use {', '.join(SOURCES)}")


def tokenizer_of(config: DataConfig) -> str | None:
    """The tokenizer that the ids of `config`'s data are of: `byte`, a tokenizer.json, or None where there is no text.

    Raises ConfigError if the folder that would tell is missing or damaged.
    """
    if config.name != "tokens":
        return describe_source(config).tokenizer
    if not config.path:
        raise ConfigError("data.path is not set")
    vocabulary = TokenIndex.read(config.path).vocabulary
    return "byte" if vocabulary.sha256 is None else str(Path(config.path, TOKENIZER_FILE))


def _describe_shakespeare(config: DataConfig) -> SourceInfo:
    if config.tokenizer != "byte":
        raise ConfigError(f"data.tokenizer={config.tokenizer}: data=shakespeare is read as bytes; use byte")
    return SourceInfo(
        name="shakespeare",
        num_train_tokens=shakespeare.NUM_TRAIN_BYTES,
        num_val_tokens=shakespeare.NUM_VAL_BYTES,
        vocab_size=BYTE_VOCABULARY.size,
        max_token_id_bound=127,  # the text is ASCII
        longest_document=shakespeare.NUM_TRAIN_BYTES,
        fingerprint=shakespeare.TEXT_SHA256,
        tokenizer=BYTE_VOCABULARY.tokenizer,
    )


def _describe_tokens(config: DataConfig) -> SourceInfo:
    if not config.path:
        raise ConfigError(
            "data.path is not set: data=tokens needs a folder made by "
            "`hp-train data prepare INPUT... --tokenizer byte --out DIR` (or use data=random to measure speed)"
        )
    train = TokenIndex.read(config.path)
    faults = _tokenizer_faults(config.tokenizer, train)
    if not config.val_path:
        if faults:
            raise ConfigError(*faults)
        num_val_tokens = num_held_out_tokens(train.num_tokens)
        return _tokens_info(train, train.num_tokens - num_val_tokens, num_val_tokens, train.max_token_id, "")
    val = TokenIndex.read(config.val_path, key="data.val_path")
    if val.vocabulary != train.vocabulary:
        faults.append(
            f"data.val_path was prepared with the tokenizer {_named(val)}, data.path with {_named(train)}; "
            "use one for both"
        )
    if faults:
        raise ConfigError(*faults)
    max_token_id = max(train.max_token_id, val.max_token_id)
    return _tokens_info(train, train.num_tokens, val.num_tokens, max_token_id, val.tokens_sha256)


def _tokens_info(
    train: TokenIndex, num_train_tokens: int, num_val_tokens: int, max_token_id: int, val_sha256: str
) -> SourceInfo:
    parts = train.tokens_sha256 + train.documents_sha256 + val_sha256
    return SourceInfo(
        name="tokens",
        num_train_tokens=num_train_tokens,
        num_val_tokens=num_val_tokens,
        vocab_size=train.vocabulary.size,
        max_token_id_bound=max_token_id,
        longest_document=min(train.longest_document, num_train_tokens),
        fingerprint=hashlib.sha256(parts.encode()).hexdigest(),
        tokenizer=train.vocabulary.tokenizer,
        tokenizer_sha256=train.vocabulary.sha256,
    )


def _tokenizer_faults(tokenizer: str, index: TokenIndex) -> list[str]:
    """A tokenizer file must be the one that the folder was prepared with; `byte`, the default, goes with any folder."""
    if tokenizer == "byte":
        return []
    try:
        digest = hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    except OSError as error:
        return [f"data.tokenizer={tokenizer} cannot be read ({error.strerror})"]
    if digest != index.vocabulary.sha256:
        return [f"data.tokenizer={tokenizer} is not the tokenizer that data.path was prepared with, {_named(index)}"]
    return []


def _named(index: TokenIndex) -> str:
    digest = index.vocabulary.sha256
    return f"{index.vocabulary.tokenizer} (sha256 {digest[:12]})" if digest else index.vocabulary.tokenizer
