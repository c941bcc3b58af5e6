"""Token recycling, beside a table kept as dictionaries."""

from torch import Tensor

from deft_policies.decoding.batch import Batch
from deft_policies.decoding.drafts import DraftLimits
from deft_policies.decoding.drafts.session import TokenRecycling
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.tree import DraftTree
from deft_policies.memory import SessionMemory
from tests.policies.decoding.scripts import Decoding, Session, batch_of, tokens_of
from tests.tiny_target import (
    ACTIONS,
    fast_target,
    greedy,
    random_prompts,
    tiny_decoder,
)

DECODER = tiny_decoder()
PROMPTS = random_prompts(DECODER, [2, 5, 3])
Table = dict[int, dict[int, float]]  # token, next token, how likely


class WatchedRecycling(TokenRecycling):
    """Keeps the tables of dictionaries beside, and compares every tree with them."""

    num_compared = 0

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        super().begin(batch, prompts, hidden)
        self.tables = [remembered(row.memory) for row in batch.rows if row is not None]

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        tree, last = super().draft(batch, limits), batch.last
        assert last is not None
        assert last.logits is not None
        for row, table in enumerate(self.tables[: len(tree.tokens)]):
            said = last.logits[row]
            told: Table = {}
            for node in range(last.tree.num_nodes):
                token = int(last.tree.tokens[row, node])
                if bool(last.tree.is_real[row, node]) and ACTIONS.first <= token <= ACTIONS.last:
                    odds = said[node].log_softmax(dim=0).tolist()
                    known = told.setdefault(token, {})
                    for behind, value in enumerate(odds, start=ACTIONS.first):
                        known[behind] = max(value, known.get(behind, -1e9))
            table.update(told)
            self._compare(table, tree, row)
        return tree

    def _compare(self, table: Table, tree: DraftTree, row: int) -> None:
        """Every guess is among the likeliest after its parent, as often as it has siblings."""
        for parent in range(tree.num_nodes):
            children = [
                node
                for node in range(1, tree.num_nodes)
                if int(tree.parents[row, node]) == parent and bool(tree.is_real[row, node])
            ]
            known = table.get(int(tree.tokens[row, parent]), {})
            best = sorted(known.values(), reverse=True)[: len(children)]
            if len(known) >= len(children):
                self.num_compared += len(children)
                assert [known[int(tree.tokens[row, node])] for node in children] == best


def remembered(session: SessionMemory) -> Table:
    table: Table = {}
    for age, step in enumerate(reversed(session.own)):
        for before, behind in zip(step, step[1:], strict=False):
            if min(before, behind) >= ACTIONS.first:
                known = table.setdefault(before, {})
                known[behind] = max(-age, known.get(behind, -1e9))
    return table


def test_trees_are_what_the_target_last_said_after_the_same_tokens() -> None:
    target = fast_target(DECODER)
    recycling = WatchedRecycling(target)
    decoder = Decoding(target, find_method("token-recycling"), None, recycling)
    session, kept = Session.of(3), 0
    for frame in (0, 1, 0, 0):
        prompts = random_prompts(DECODER, [2, 5, 3], frame)
        traces = decoder.decode(prompts, session)
        assert tokens_of(traces) == greedy(DECODER, prompts)
        kept += sum(sum(trace.accepted_lengths) for trace in traces)
    assert recycling.num_compared > 100
    assert kept > 6


def test_of_what_followed_a_token_the_newest_comes_first() -> None:
    own = tuple((30, behind, 40, 40, 40, 40, 40) for behind in (31, 32, 33, 31))
    batch = batch_of([SessionMemory(own=own)], [[]])
    recycling = TokenRecycling(fast_target(DECODER))
    recycling.allocate(batch)
    recycling.begin(batch, random_prompts(DECODER, [2]), None)
    row = recycling._table[0, 30 - ACTIONS.first]
    best = (row.topk(4).indices + ACTIONS.first).tolist()
    assert best[:3] == [31, 33, 32]
    assert row.topk(3).values.tolist() == [0.0, -1.0, -2.0]
