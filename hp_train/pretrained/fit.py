"""Does `model.pretrained` fit this run? Told from config.json and the weights' headers, before any worker. No torch.

`adopt_shape` makes the model's shape that of the directory; `misfits` holds the stored tensors against it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path

from hp_train.config.faults import Fault
from hp_train.config.numbers import spell
from hp_train.config.schema import ModelSection, TrainerConfig
from hp_train.data.index import describe_source
from hp_train.errors import ConfigError
from hp_train.models.shapes import EMBEDDING_NAME, HEAD_NAME, parameter_shapes
from hp_train.pretrained.hf_config import CONFIG_FILE, NAMES_IN_FILE, model_fields, read_hf_config
from hp_train.pretrained.safetensors_header import DTYPE_BYTES, StoredTensor, stored_tensors

KEY = "model.pretrained"
TOKENIZER_FILE = "tokenizer.json"
_UNKNOWN = ("model.",)
_NO_PARAMETER = ".rotary_emb.inv_freq"  # a buffer that early checkpoints hold; it follows from the config


def adopt_shape(config: TrainerConfig, typed: Collection[str]) -> list[Fault]:
    """Give `config.model` the shape that config.json of `model.pretrained` states, in place; return what is wrong.

    `typed` are the keys given one by one: those must not contradict the file. The values of a recipe or of a model
    option give way. A `model.max_seq_len` below the file's stands: no weight depends on it.
    """
    model = config.model
    assert model.pretrained is not None, "nothing to adopt"
    setting = f"{KEY}={model.pretrained}"
    try:
        fields = model_fields(read_hf_config(directory(model), setting), setting)
    except ConfigError as error:
        return [Fault(message, _UNKNOWN) for message in error.messages]
    faults = list(_contradictions(model, fields, typed))
    for name, value in fields.items():
        if name == "max_seq_len" and "model.max_seq_len" in typed:
            value = min(value, model.max_seq_len)
        setattr(model, name, value)
    return faults


def directory(model: ModelSection) -> Path:
    """Return the directory that `model.pretrained` names."""
    assert model.pretrained is not None, "there is no pretrained model"
    return Path(model.pretrained).expanduser()


def misfits(model: ModelSection) -> list[str]:
    """Return why the weights of `model.pretrained` cannot be loaded into `model`, one line for each kind of fault."""
    setting = f"{KEY}={model.pretrained}"
    try:
        tensors = stored_tensors(directory(model), setting)
    except ConfigError as error:
        return list(error.messages)
    return [f"{setting}: {fault}" for fault in _tensor_misfits(tensors, model)]


def stored_name(name: str, model: ModelSection, stored: Collection[str]) -> str:
    """Return the name under which parameter `name` is stored: a tied matrix may be there as either of its two."""
    if model.tie_embeddings and name in (EMBEDDING_NAME, HEAD_NAME):
        return EMBEDDING_NAME if EMBEDDING_NAME in stored else HEAD_NAME
    return name


def tokenizer_warnings(config: TrainerConfig) -> Iterator[str]:
    """Yield a line when the data was not made with the tokenizer that lies beside the weights."""
    if config.model.pretrained is None or config.data.name == "random":
        return
    beside = directory(config.model) / TOKENIZER_FILE
    try:
        digest = hashlib.sha256(beside.read_bytes()).hexdigest()
        source = describe_source(config.data)
    except (OSError, ConfigError):
        return  # no tokenizer to compare with; faults of the data are told elsewhere
    if source.tokenizer_sha256 != digest:
        yield (
            f"data={config.data.name} holds ids of the tokenizer {source.tokenizer}, not of {beside}, which the "
            f"weights know; prepare it again with `hp-train data prepare INPUT --tokenizer {beside} --out DIR`"
        )


def _contradictions(model: ModelSection, fields: dict[str, object], typed: Collection[str]) -> Iterator[Fault]:
    for name, value in fields.items():
        key = f"model.{name}"
        given = getattr(model, name)
        is_typed = key in typed or any(other.startswith(f"{key}.") for other in typed)
        if name == "num_kv_heads":
            given, value = given or model.num_heads, value or fields["num_heads"]
        fits = given <= value if name == "max_seq_len" else given == value
        if is_typed and not fits:
            limit = "is more than" if name == "max_seq_len" else "contradicts"
            yield Fault(
                f"{key}={_shown(given)} {limit} {NAMES_IN_FILE[name]}={_shown(value)} in {CONFIG_FILE} of "
                f"{KEY}={model.pretrained}; leave {key} out",
                (key,),
            )


def _shown(value: object) -> str:
    if hasattr(value, "factor"):
        return f"llama3 with factor {value.factor:g}"
    return spell(value)


def _tensor_misfits(tensors: dict[str, StoredTensor], model: ModelSection) -> Iterator[str]:
    wanted = parameter_shapes(model)
    missing, different, of_dtype = [], [], []
    for name, shape in wanted.items():
        tensor = tensors.get(stored_name(name, model, tensors))
        if tensor is None:
            missing.append(name)
        elif tensor.shape != shape:
            different.append(f"{name} is {list(tensor.shape)} in {tensor.file} and {list(shape)} by {CONFIG_FILE}")
        elif tensor.dtype not in DTYPE_BYTES:
            of_dtype.append(f"{name} is {tensor.dtype}")
    known = {*wanted, HEAD_NAME} if model.tie_embeddings else set(wanted)
    more = [name for name in tensors if name not in known and not name.endswith(_NO_PARAMETER)]
    if missing:
        yield f"the weights lack {_some(missing)}"
    if different:
        yield _some(different)
    if of_dtype:
        yield f"{_some(of_dtype)}; weights are read from {', '.join(DTYPE_BYTES)}"
    if more:
        yield f"the weights hold {_some(more)}, which the model of {CONFIG_FILE} does not have"


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
