"""A Hugging Face `config.json` of the Llama family to the fields of `ModelSection`, and back. No torch.

Both spellings of the rotary settings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`, which newer
versions of transformers write. What is in the file and would change the model's numbers, but has no counterpart here
(biases, another activation, another kind of rotary scaling), is refused rather than dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hp_train.config.schema import ModelSection, RopeScalingSection
from hp_train.errors import ConfigError
from hp_train.models.shapes import head_dim, num_kv_heads

CONFIG_FILE = "config.json"

# Our field, its name in config.json, and the value that LlamaConfig documents for a file without it (... if it must be
# there).
_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("vocab_size", "vocab_size", ...),
    ("dim", "hidden_size", ...),
    ("num_layers", "num_hidden_layers", ...),
    ("num_heads", "num_attention_heads", ...),
    ("num_kv_heads", "num_key_value_heads", None),
    ("ffn_dim", "intermediate_size", ...),
    ("norm_eps", "rms_norm_eps", 1e-6),
    ("tie_embeddings", "tie_word_embeddings", False),
    ("max_seq_len", "max_position_embeddings", 2048),
)
NAMES_IN_FILE = {ours: theirs for ours, theirs, _ in _FIELDS} | {
    "rope_theta": "rope_theta", "rope_scaling": "rope_scaling",
}  # fmt: skip
"""Our field -> what it is called in config.json."""

_SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Settings under which the model here computes something else, with the values that are harmless.
_ONLY: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("hidden_act", ("silu", "swish", None)),
    ("attention_bias", (False, None)),
    ("mlp_bias", (False, None)),
    ("quantization_config", (None,)),
    ("sliding_window", (None,)),
    ("partial_rotary_factor", (1, None)),
)
_KINDS: dict[str, tuple[type, ...]] = {
    "norm_eps": (float, int), "rope_theta": (float, int), "tie_embeddings": (bool,), "num_kv_heads": (int, type(None)),
}  # fmt: skip


def read_hf_config(folder: Path, setting: str) -> dict[str, Any]:
    """Return config.json of the directory `folder` as it is. `setting` is the key as typed, for errors.

    Raises ConfigError, one line, when there is none or it is not a JSON object.
    """
    if not folder.is_dir():
        what = "is not a directory" if folder.exists() else "does not exist"
        raise ConfigError(f"{setting} {what}; name a directory with {CONFIG_FILE} and safetensors files")
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{setting} holds no {CONFIG_FILE}; name a directory with one and safetensors files"
        ) from None
    except OSError as error:
        raise ConfigError(f"{setting}: {CONFIG_FILE} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}: {CONFIG_FILE} is not JSON ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{setting}: {CONFIG_FILE} is not a JSON object")
    return content


def model_fields(content: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """Return field of `ModelSection` -> value for everything that config.json decides.

    Raises ConfigError with a line for each thing in it that is missing, of the wrong type, or not supported.
    """
    faults = list(_unsupported(content))
    fields: dict[str, Any] = {}
    for ours, theirs, default in _FIELDS:
        value = content.get(theirs)
        if value is None:
            value = default
        if value is ...:
            faults.append(f"{theirs} is missing")
        else:
            fields[ours] = value
    rope, rope_faults = _rope_fields(content)
    faults += rope_faults
    fields.update(rope)
    for ours, value in fields.items():
        kinds = _KINDS.get(ours, (int,))
        if ours != "rope_scaling" and not (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            faults.append(f"{NAMES_IN_FILE[ours]}={json.dumps(value)} has the wrong type")
    if not faults:
        faults.extend(_head_faults(content, fields))
    if faults:
        raise ConfigError(*(f"{setting}: in {CONFIG_FILE}, {fault}" for fault in faults))
    for ours in ("norm_eps", "rope_theta"):
        fields[ours] = float(fields[ours])
    return fields


def hf_config(model: ModelSection, dtype: str, special_ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the content of config.json for `model`, whose weights are stored as `dtype` (float32, bfloat16, float16).

    `special_ids` maps bos_token_id, eos_token_id and pad_token_id to ids. The rotary settings are spelt in the older
    way, which all versions of transformers read.
    """
    scaling = model.rope_scaling
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(model, ours) for ours, theirs, _ in _FIELDS},
        "num_key_value_heads": num_kv_heads(model),
        "head_dim": head_dim(model),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "torch_dtype": dtype,
        "use_cache": True,
        **special_ids,
    }
    if scaling is not None:
        content["rope_scaling"] = {"rope_type": "llama3", **{name: getattr(scaling, name) for name in _SCALING_FIELDS}}
    return content


def _unsupported(content: Mapping[str, Any]) -> Iterator[str]:
    kind = content.get("model_type")
    if kind != "llama":
        yield f"model_type={json.dumps(kind)} is no Llama; use a model with model_type llama"
    for name, harmless in _ONLY:
        value = content.get(name)
        if value not in harmless:
            text = json.dumps(value)
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            yield f"{name}={shown} is not supported; the model here has {name}={json.dumps(harmless[0])}"


def _rope_fields(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return rope_theta and rope_scaling (None or a RopeScalingSection), and what is wrong with them."""
    merged = content.get("rope_parameters")
    scaling = content.get("rope_scaling")
    for name, value in (("rope_parameters", merged), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, dict):
            return {}, [f"{name}={json.dumps(value)} has the wrong type"]
    settings = {**(scaling or {}), **(merged or {})}
    theta = settings.get("rope_theta", content.get("rope_theta", 10_000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}, []
    if kind != "llama3":
        return {}, [f"rope_scaling has rope_type={json.dumps(kind)}, which is not supported; use default or llama3"]
    missing = [name for name in _SCALING_FIELDS if not _is_number(settings.get(name))]
    if missing:
        return {}, [f"rope_scaling of type llama3 has no number for {', '.join(missing)}"]
    factor, low, high, original = (settings[name] for name in _SCALING_FIELDS)
    section = RopeScalingSection(float(factor), float(low), float(high), int(original))
    return {"rope_theta": theta, "rope_scaling": section}, []


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _head_faults(content: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[str]:
    given, dim, heads = content.get("head_dim"), fields["dim"], fields["num_heads"]
    if given is not None and given * heads != dim:
        yield (
            f"head_dim={given} is not hidden_size / num_attention_heads = {dim} / {heads}; "
            "models whose heads are not a share of hidden_size are not supported"
        )
