"""Rules on the data: it is there, the model's vocabulary holds its tokens, it is long enough. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hp_train.config.rule import Rule
from hp_train.config.schema import TrainerConfig
from hp_train.data.index import describe_source
from hp_train.errors import ConfigError


def _source(config: TrainerConfig) -> Iterator[str]:
    try:
        source = describe_source(config.data)
    except ConfigError as error:
        yield from error.messages
        return
    yield from source.faults(
        seq_len=config.trainer.seq_len,
        vocab_size=config.model.vocab_size,
        document_boundaries=config.data.document_boundaries,
        evaluates=config.trainer.eval_every > 0,
    )


RULES = (
    Rule(
        (
            "data.name", "data.path", "data.val_path", "data.tokenizer", "data.document_boundaries", "trainer.seq_len",
            "trainer.eval_every", "model.vocab_size", "data.mix", "data.sources",
        ),
        _source,
    ),
)  # fmt: skip
