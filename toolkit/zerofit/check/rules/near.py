"""The known name that a wrong one most likely means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def near(word: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str | None:
    """The same name in another case, a known synonym, or the closest spelling; None where nothing is close."""
    names = list(known)
    plain = {n.lower().replace("_", "").replace("-", ""): n for n in names}
    bare = word.lower().replace("_", "").replace("-", "")
    if bare in plain:
        return plain[bare]
    meant = (synonyms or {}).get(word.lower())
    if meant in names:
        return meant
    close = difflib.get_close_matches(bare, plain, n=1, cutoff=0.6)
    return plain[close[0]] if close else None
