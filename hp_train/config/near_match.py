"""What a person probably meant by a word that is not known. No torch; imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most like `word`, case aside; None when none is much like it."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def nearest_key(key: str, known: Iterable[str]) -> list[str]:
    """Return the dotted keys that `key` may stand for: those that end in the same word, else the one most like it."""
    known = list(known)
    section, dot, name = key.rpartition(".")
    same_end = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    if same_end:
        return _nearest_first(key, same_end)
    sections = {candidate.rpartition(".")[0] for candidate in known}
    near_section = section if section in sections else nearest(section, sections)
    if dot and near_section:
        siblings = {c.rpartition(".")[2]: c for c in known if c.rpartition(".")[0] == near_section}
        match = nearest(name, siblings)
        if match is not None:
            return [siblings[match]]
    by_end = {candidate.rpartition(".")[2]: candidate for candidate in known}
    match = nearest(name, by_end)
    return [by_end[match]] if match is not None else []


def _nearest_first(key: str, candidates: list[str]) -> list[str]:
    """At most three; just one where a section is named that one candidate's section is like."""
    if "." in key:
        match = nearest(key, candidates)
        return [match] if match else candidates[:3]
    return candidates[:3]


def did_you_mean(words: Iterable[str | None]) -> str:
    """Return ` (did you mean a or b?)`, or nothing."""
    found = [word for word in words if word]
    return f" (did you mean {' or '.join(found)}?)" if found else ""
