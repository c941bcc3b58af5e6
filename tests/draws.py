"""How many cases the tests draw that look for the one that nobody thought of."""

import os

TIMES = int(os.environ.get("DEFT_DRAWS", "1"))


def draws(count: int) -> int:
    """`count` cases at a desk; DEFT_DRAWS times as many: 4 in `make test-all`, 10 every night."""
    return count * TIMES
