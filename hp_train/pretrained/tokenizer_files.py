"""The tokenizer's files of an exported model, as transformers' AutoTokenizer reads them. No torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hp_train.data.token_folder import BYTE_VOCABULARY, TOKENIZER_FILE
from hp_train.data.tokenizer import open_tokenizer
from hp_train.pretrained.run_tokenizer import BYTE, RunTokenizer

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_BYTE_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# What lies beside a tokenizer.json in a directory of transformers and belongs to the tokenizer.
_COMPANIONS = (TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def write_tokenizer_files(folder: Path, tokenizer: RunTokenizer, max_seq_len: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`; nothing where the data had no text."""
    if tokenizer.name is None:
        return
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.name == BYTE:
        (folder / TOKENIZER_FILE).write_text(byte_tokenizer_json(), encoding="utf-8")
        settings |= _BYTE_SPECIALS
    else:
        shutil.copyfile(tokenizer.name, folder / TOKENIZER_FILE)
        settings |= _specials_of(tokenizer.name)
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name in _COMPANIONS:
        if tokenizer.beside is not None and (tokenizer.beside / name).is_file():
            shutil.copyfile(tokenizer.beside / name, folder / name)


def byte_tokenizer_json() -> str:
    """Return a tokenizer.json that gives each byte of UTF-8 text its value as id, then begin, end and padding."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_printable_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _BYTE_SPECIALS.values()])
    assert tokenizer.get_vocab_size() == BYTE_VOCABULARY.size
    return tokenizer.to_str()


def _printable_bytes() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary (Radford et al. 2019, GPT-2).

    Printable Latin-1 bytes stand for themselves, the others for the code points from 256 on, in their order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _specials_of(name: str) -> dict[str, str]:
    """Return the special tokens of a tokenizer.json by their names in tokenizer_config.json."""
    tokenizer = open_tokenizer(name, "the run's tokenizer")
    vocabulary = tokenizer.vocabulary
    ids = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id, "pad_token": vocabulary.pad_id}
    return {key: tokenizer.token(token_id) for key, token_id in ids.items() if token_id is not None}
