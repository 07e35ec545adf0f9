"""Rules on the shape of the model. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hp_train import registry
from hp_train.config.rule import Rule, divisors_text
from hp_train.config.schema import TrainerConfig
from hp_train.config.schema_tree import value_at


def _heads(config: TrainerConfig) -> Iterator[str]:
    model = config.model
    if registry.find("model", model.name) is not None:
        return  # whether it has heads is its own affair
    if model.dim % model.num_heads:
        yield f"model.num_heads={model.num_heads} does not divide model.dim={model.dim}; use {divisors_text(model.dim)}"
    elif model.dim // model.num_heads % 2:
        yield (
            f"model.dim={model.dim} / model.num_heads={model.num_heads} = {model.dim // model.num_heads} features "
            "a head, an odd number; rotary embeddings turn pairs, use sizes that give an even one"
        )


def _kv_heads(config: TrainerConfig) -> Iterator[str]:
    model = config.model
    if (
        registry.find("model", model.name) is None
        and model.num_kv_heads is not None
        and model.num_heads % model.num_kv_heads
    ):
        yield (
            f"model.num_kv_heads={model.num_kv_heads} does not divide model.num_heads={model.num_heads}; "
            f"use {divisors_text(model.num_heads)}"
        )


def _sequence(config: TrainerConfig) -> Iterator[str]:
    if config.trainer.seq_len > config.model.max_seq_len:
        yield (
            f"trainer.seq_len={config.trainer.seq_len} is longer than model.max_seq_len={config.model.max_seq_len}; "
            f"use at most {config.model.max_seq_len}"
        )


def _rope_scaling(config: TrainerConfig) -> Iterator[str]:
    scaling = config.model.rope_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} is not above "
            f"model.rope_scaling.low_freq_factor={scaling.low_freq_factor}"
        )


def _plugged(kind: str, config: TrainerConfig) -> Iterator[str]:
    """What the chosen component of a plugin has against its settings: `faults(config)` of its config class."""
    if kind == "pp_schedule" and config.accelerator.pp_size == 1:
        return  # nothing is scheduled
    component = registry.find(kind, value_at(config, registry.NAME_KEYS[kind]))
    own = None if component is None else registry.settings_of(component, config)
    if hasattr(own, "faults"):
        yield from (f"{component.section}: {fault}" for fault in own.faults(config))


RULES = (
    *(
        Rule((key.partition(".")[0], "accelerator.pp_size"), partial(_plugged, kind))
        for kind, key in registry.NAME_KEYS.items()
    ),
    Rule(("model.dim", "model.num_heads"), _heads),
    Rule(("model.num_heads", "model.num_kv_heads"), _kv_heads),
    Rule(("trainer.seq_len", "model.max_seq_len"), _sequence),
    Rule(("model.rope_scaling",), _rope_scaling),
)
