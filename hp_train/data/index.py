"""What a run's data section refers to, known before anything starts: sizes, vocabulary, and whether a run fits it.

May import errors and the modules of `data` that need neither torch nor numpy. Reads index files only, no tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hp_train import registry
from hp_train.data import shakespeare
from hp_train.data.megatron import MegatronIndex, is_megatron
from hp_train.data.token_folder import BYTE_VOCABULARY, TOKENIZER_FILE, TokenIndex, Vocabulary
from hp_train.errors import ConfigError

SOURCES = ("shakespeare", "tokens", "random")
SHAKESPEARE = "shakespeare"


class DataConfig(Protocol):
    """The `data` section of a config, as far as it is read here."""

    name: str
    path: str | None
    val_path: str | None
    tokenizer: str
    document_boundaries: str
    mix: Mapping[str, float]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What the data section refers to, or one source of its mix.

    Token counts are None where there is no end (random) and for a mix, whose `parts` have them. `vocab_size` is the
    tokenizer's, special tokens included, and `max_token_id_bound` the largest id that occurs; None where files do not
    tell (Megatron's) and for random, which follows the model. `longest_document` is in tokens. `fingerprint` changes
    with any token of either part. `tokenizer` is its name, None where it is not known; `tokenizer_sha256` is of its
    file, None for bytes. `setting` is what to call it in errors; empty: data=NAME.
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
    setting: str = ""
    parts: tuple[SourceInfo, ...] = ()

    def faults(self, *, seq_len: int, vocab_size: int, document_boundaries: str, evaluates: bool) -> list[str]:
        """One line for each reason why a run with these settings, evaluating or not, cannot read this data."""
        setting = self.setting or f"data={self.name}"
        found = [
            fault
            for part in self.parts
            for fault in part.faults(
                seq_len=seq_len, vocab_size=vocab_size, document_boundaries=document_boundaries, evaluates=evaluates
            )
        ]
        if evaluates and self.num_val_tokens is not None and self.num_val_tokens < 2:
            found.append(
                f"{setting}: {self.num_val_tokens} validation tokens leave nothing to predict; "
                "set data.val_path, or trainer.eval_every=0"
            )
        if self.max_token_id_bound is not None and self.max_token_id_bound >= vocab_size:
            found.append(
                f"model.vocab_size={vocab_size} is too small: {setting} holds token id "
                f"{self.max_token_id_bound}; use {self.max_token_id_bound + 1} or more"
            )
        if document_boundaries == "pad":
            if self.longest_document is not None and self.longest_document < 2:
                found.append(f"{setting}: no document is longer than one token, which leaves nothing to predict")
        elif self.num_train_tokens is not None and self.num_train_tokens <= seq_len:
            where = self.setting or "the data"
            found.append(
                f"trainer.seq_len={seq_len} is longer than {where}: {self.num_train_tokens:,} training tokens; "
                f"use {self.num_train_tokens - 1} or less"
            )
        return found


@dataclass(frozen=True, slots=True)
class _Files:
    """What one path holds, in either format."""

    num_tokens: int
    longest_document: int | None
    max_token_id: int | None
    vocabulary: Vocabulary | None
    fingerprint: str

    @classmethod
    def read(cls, path: str, key: str) -> _Files:
        if is_megatron(path):
            megatron = MegatronIndex.read(path, key)
            return cls(megatron.num_tokens, None, None, None, megatron.fingerprint())
        index = TokenIndex.read(path, key)
        parts = index.tokens_sha256 + index.documents_sha256
        return cls(index.num_tokens, index.longest_document, index.max_token_id, index.vocabulary, parts)


def num_held_out_tokens(num_tokens: int) -> int:
    """Tokens at the end of a corpus that are for validation where no other text is given: a tenth."""
    return num_tokens - num_tokens * 9 // 10


def describe_source(config: DataConfig) -> SourceInfo:
    """Describe what `config` refers to, from index files alone. Raises ConfigError, one line for each fault."""
    if config.mix:
        return _describe_mix(config)
    plugged = registry.find("data", config.name)
    if plugged is not None:
        return _describe_plugged(plugged, config)
    if config.name == SHAKESPEARE:
        return _describe_shakespeare(config, "")
    if config.name == "tokens":
        if not config.path:
            raise ConfigError(
                "data.path is not set: data=tokens needs a folder made by "
                "`hp-train data prepare INPUT... --tokenizer byte --out DIR` (or use data=random to measure speed)"
            )
        return _describe_tokens("tokens", "", config.path, "data.path", config.val_path, config.tokenizer)
    if config.name == "random":
        return SourceInfo("random", None, None, None, None, None, "random")
    raise ConfigError(f"data.name={config.name} is unknown; use {', '.join(SOURCES)}")


def tokenizer_of(config: DataConfig) -> str | None:
    """The tokenizer that the ids of `config`'s data are of: `byte`, a tokenizer.json, or None where none is known.

    Raises ConfigError if the folder that would tell is missing or damaged.
    """
    paths = [config.path] if config.name == "tokens" and not config.mix else []
    if config.mix:
        paths = [config.sources.get(name) for name in config.mix]  # None for the text that ships
    elif config.name != "tokens":
        return describe_source(config).tokenizer
    for path in paths:
        if path is None and config.mix:
            return BYTE_VOCABULARY.tokenizer
        if path is None:
            raise ConfigError("data.path is not set")
        vocabulary = _Files.read(path, "data.path").vocabulary
        if vocabulary is not None:
            return "byte" if vocabulary.sha256 is None else str(Path(path, TOKENIZER_FILE))
    return None if config.tokenizer == "byte" else config.tokenizer  # Megatron's files do not tell


def mix_shares(mix: Mapping[str, float]) -> dict[str, float]:
    """Return each source's share of the samples: its weight over the sum of all."""
    total = sum(mix.values())
    return {name: weight / total for name, weight in mix.items()}


def _describe_mix(config: DataConfig) -> SourceInfo:
    faults: list[str] = []
    parts: list[SourceInfo] = []
    for name in config.mix:
        try:
            parts.append(_describe_part(config, name))
        except ConfigError as error:
            faults.extend(error.messages)
    known = [part for part in parts if part.tokenizer is not None]
    for part in known[1:]:
        if (part.tokenizer, part.tokenizer_sha256) != (known[0].tokenizer, known[0].tokenizer_sha256):
            faults.append(
                f"data.mix: {part.name} holds ids of the tokenizer {_named(part.tokenizer, part.tokenizer_sha256)}, "
                f"{known[0].name} of {_named(known[0].tokenizer, known[0].tokenizer_sha256)}; prepare them with one"
            )
    if faults:
        raise ConfigError(*faults)
    shares = mix_shares(config.mix)
    text = repr([(part.name, shares[part.name], part.fingerprint) for part in parts])
    first = known[0] if known else None
    return SourceInfo(
        name="mix",
        num_train_tokens=None,
        num_val_tokens=None,
        vocab_size=first.vocab_size if first else None,
        max_token_id_bound=None,
        longest_document=None,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        tokenizer=first.tokenizer if first else None,
        tokenizer_sha256=first.tokenizer_sha256 if first else None,
        parts=tuple(parts),
    )


def _describe_part(config: DataConfig, name: str) -> SourceInfo:
    setting = f"data.mix.{name}"
    if name == SHAKESPEARE and name not in config.sources:
        return _describe_shakespeare(config, setting)
    if name not in config.sources:
        known = ", ".join(sorted({SHAKESPEARE, *config.sources}))
        raise ConfigError(
            f"{setting}: there is no source {name}; use {known}, or say where it is: data.sources.{name}=PATH"
        )
    return _describe_tokens(name, setting, config.sources[name], f"data.sources.{name}", None, "byte")


def _describe_plugged(component: registry.Component, config: DataConfig) -> SourceInfo:
    """Ask a plugin's source; one that does not describe itself is taken to have no end, and any token."""
    if component.describe is None:
        return SourceInfo(component.name, None, None, None, None, None, component.name)
    own = None if component.config is None else getattr(config, component.name)
    return registry.resolve(component.describe)(own)


def _describe_shakespeare(config: DataConfig, setting: str) -> SourceInfo:
    if config.tokenizer != "byte":
        raise ConfigError(
            f"data.tokenizer={config.tokenizer}: {setting or 'data=shakespeare'} is read as bytes; use byte"
        )
    return SourceInfo(
        name=SHAKESPEARE,
        num_train_tokens=shakespeare.NUM_TRAIN_BYTES,
        num_val_tokens=shakespeare.NUM_VAL_BYTES,
        vocab_size=BYTE_VOCABULARY.size,
        max_token_id_bound=127,  # the text is ASCII
        longest_document=shakespeare.NUM_TRAIN_BYTES,
        fingerprint=shakespeare.TEXT_SHA256,
        tokenizer=BYTE_VOCABULARY.tokenizer,
        setting=setting,
    )


def _describe_tokens(name: str, setting: str, path: str, key: str, val_path: str | None, tokenizer: str) -> SourceInfo:
    train = _Files.read(path, key)
    faults = _tokenizer_faults(tokenizer, train.vocabulary)
    val = _Files.read(val_path, "data.val_path") if val_path else None
    if val is not None and None not in (val.vocabulary, train.vocabulary) and val.vocabulary != train.vocabulary:
        faults.append(
            f"data.val_path was prepared with the tokenizer {_of(val.vocabulary)}, data.path with "
            f"{_of(train.vocabulary)}; use one for both"
        )
    if faults:
        raise ConfigError(*faults)
    if val is None:
        num_val_tokens = num_held_out_tokens(train.num_tokens)
        num_train_tokens = train.num_tokens - num_val_tokens
    else:
        num_train_tokens, num_val_tokens = train.num_tokens, val.num_tokens
    largest_ids = [files.max_token_id for files in (train, val) if files and files.max_token_id is not None]
    return SourceInfo(
        name=name,
        num_train_tokens=num_train_tokens,
        num_val_tokens=num_val_tokens,
        vocab_size=train.vocabulary.size if train.vocabulary else None,
        max_token_id_bound=max(largest_ids, default=None),
        longest_document=None if train.longest_document is None else min(train.longest_document, num_train_tokens),
        fingerprint=hashlib.sha256((train.fingerprint + (val.fingerprint if val else "")).encode()).hexdigest(),
        tokenizer=train.vocabulary.tokenizer if train.vocabulary else None,
        tokenizer_sha256=train.vocabulary.sha256 if train.vocabulary else None,
        setting=setting,
    )  # fmt: skip


def _tokenizer_faults(tokenizer: str, vocabulary: Vocabulary | None) -> list[str]:
    """A tokenizer file must be the one that a folder was prepared with; `byte`, the default, goes with any folder."""
    if tokenizer == "byte":
        return []
    try:
        digest = hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    except OSError as error:
        return [f"data.tokenizer={tokenizer} cannot be read ({error.strerror})"]
    if vocabulary is not None and digest != vocabulary.sha256:
        return [f"data.tokenizer={tokenizer} is not the tokenizer that data.path was prepared with, {_of(vocabulary)}"]
    return []


def _of(vocabulary: Vocabulary) -> str:
    return _named(vocabulary.tokenizer, vocabulary.sha256)


def _named(tokenizer: str | None, sha256: str | None) -> str:
    return f"{tokenizer} (sha256 {sha256[:12]})" if sha256 else str(tokenizer)
