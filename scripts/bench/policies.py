"""`deft serve` with one policy more, which only benches ask for: `spinning`."""

import sys
import time
from collections.abc import Sequence

from deft_policies.base import ActAnswer, ActRequest
from deft_policies.catalog import CATALOG, CatalogEntry
from deft_policies.constant import ConstantPolicy
from deft_server.__main__ import main


class SpinningPolicy(ConstantPolicy):
    """Computes for a second in Python, and so holds the interpreter whenever it can."""

    def act(self, batch: Sequence[ActRequest]) -> list[ActAnswer]:
        until_s = time.perf_counter() + 1.0
        while time.perf_counter() < until_s:
            pass
        return super().act(batch)


if __name__ == "__main__":
    CATALOG["spinning"] = CatalogEntry(
        SpinningPolicy.__doc__ or "", lambda _: None, lambda _: SpinningPolicy()
    )
    raise SystemExit(main(sys.argv[1:]))
