"""Decoding methods, a file for each paper or idea.

Files are found by their names. Delete one, and what it holds is gone, and nothing else. A file says
in its docstring what the paper says in its letters, by what it drafts, what was left out and where
the numbers are, and holds any of:

- `METHODS`: names of methods, each with its text (`NAME:KNOB=VALUE,...`)
- `RULES`: names that `rule=` takes, each with a class
- `PLANS`: names that `plans=` takes, each with plans
- `SOURCES`: names of draft sources, each with what makes it of the target
- `MEANINGS`: what these sources guess, in words
- `OPTIONS`: names of knobs that sources read, each with what reads its value from text

Packages bring rules and sources under entry points instead (docs/plugins.md). The pages under
docs/methods are made of these files.
"""

# As people read about them; files that are not named here come last.
READING_ORDER = (
    "lossless",
    "deft",
    "numbers",
    "spec_vla",
    "block",
    "medusa",
    "fly",
    "lvspec",
    "small_model",
    "specvlm",
    "pld",
    "token_recycling",
    "heisd",
    "kerv",
    "ratio_test",
    "within_bins",
    "top_k",
    "near_top",
    "entropy_radius",
)
