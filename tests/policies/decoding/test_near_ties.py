"""Exact match in bfloat16: a part of `python -m tests.near_ties`, and a mistake it must see."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deft_policies.decoding import kinds
from deft_policies.decoding.kinds import OUR_KINDS
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree
from deft_policies.families.openvla import VlaTarget
from deft_policies.model.kv_cache import KVCache
from tests.near_ties import Bench

NUM_SESSIONS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with torch.inference_mode():
        yield tmp_path_factory.mktemp("near_ties")


@pytest.fixture(scope="module")
def bench(folder: Path) -> Bench:
    return Bench(folder)


@pytest.mark.parametrize("kind", OUR_KINDS)
def test_every_token_that_flips_in_bfloat16_is_a_near_tie(bench: Bench, kind: str) -> None:
    flips = [flip for number in range(NUM_SESSIONS) for flip in bench.flips(kind, number)]
    assert [flip for flip in flips if not flip.is_near_tie] == []


class BlindTarget(VlaTarget):
    """Scores a tree as a chain of its tokens, one place off."""

    def score(self, rows: KVCache, tree: DraftTree) -> Scores:
        wrong = DraftTree.chain(tree.tokens.roll(1, dims=1))
        return replace(super().score(rows, wrong), answers=tree.answers)


def test_a_mistake_is_no_near_tie(folder: Path) -> None:
    bench = Bench(folder / "blind", kind=BlindTarget)
    flips = [flip for number in range(4) for flip in bench.flips(kinds.PREVIOUS, number)]
    assert [flip for flip in flips if not flip.is_near_tie] != []
