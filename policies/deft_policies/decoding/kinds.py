"""Names of draft sources of the core, and of all that there are. Imports nothing heavy."""

import re
from functools import lru_cache
from importlib.metadata import entry_points

HEAD = "head"  # the trained EAGLE-style draft head
PREVIOUS = "previous"  # the target's own last action
EXTRAPOLATION = "extrapolation"  # the last actions, continued in a straight line
RECYCLED = "recycled"  # the target's predictions after its last mismatch (Jacobi)
BLOCK = "block"  # a trained head that drafts a block of tokens in one pass
MEDUSA = "medusa"  # parallel heads, one per position ahead
SMALL_MODEL = "small-model"  # a cheaper model of the same actions
PREVIOUS_ANSWER = "previous-answer"  # the whole last answer, lined up with this one
PREVIOUS_NUMBERS = "previous-numbers"  # the last answer's rows of numbers, moved and as they were

OUR_KINDS = (
    HEAD,
    PREVIOUS,
    EXTRAPOLATION,
    RECYCLED,
    BLOCK,
    MEDUSA,
    SMALL_MODEL,
)
# What each of them guesses, for tables that name plans.
MEANINGS = {
    HEAD: "the draft head",
    PREVIOUS: "the last action",
    EXTRAPOLATION: "the last actions, continued in a straight line",
    RECYCLED: "the model's own predictions behind its last mismatch",
    BLOCK: "the block head",
    MEDUSA: "parallel draft heads",
    SMALL_MODEL: "a smaller model",
    PREVIOUS_ANSWER: "the whole last answer, lined up with this one",
    PREVIOUS_NUMBERS: "the numbers of the last answer, moved on and as they were",
}
SOURCES = "deft.draft_sources"  # the entry points under which packages bring sources


@lru_cache(maxsize=1)
def source_kinds() -> tuple[str, ...]:
    """Every source there can be: the core's, then those of method files and of packages."""
    from deft_policies.decoding.plugins import from_files  # which imports methods

    theirs = sorted({point.name for point in entry_points(group=SOURCES)})
    all_kinds = (*OUR_KINDS, *from_files("SOURCES"), PREVIOUS_ANSWER, PREVIOUS_NUMBERS, *theirs)
    return tuple(dict.fromkeys(all_kinds))


def meaning(kind: str) -> str:
    """What a source guesses, in words; of a package's source, its name."""
    from deft_policies.decoding.plugins import from_files

    meanings: dict[str, str] = MEANINGS | from_files("MEANINGS")
    return meanings.get(kind, f"the source {kind}")


def read_kinds(text: str) -> tuple[str, ...]:
    """Draft sources by name, joined by + or commas, each once."""
    all_kinds = source_kinds()
    names = [name.strip() for name in re.split(r"[,+]", text)]
    unknown = [name for name in names if name not in all_kinds]
    if unknown:
        raise ValueError(f"unknown source {unknown[0]!r}; known: {', '.join(all_kinds)}")
    return tuple(dict.fromkeys(names))
