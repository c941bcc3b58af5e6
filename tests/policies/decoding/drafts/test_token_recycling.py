"""Token recycling, beside a table kept as dictionaries."""

from collections.abc import Sequence

from torch import Tensor

from deft_policies.decoding.drafts import Branches, Guesses
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.memory import SessionMemory
from deft_policies.methods.token_recycling import TokenRecycling
from tests.policies.decoding.scripts import Decoding, Session, answer_of, tokens_of
from tests.tiny_target import ACTIONS, fast_target, greedy, random_prompts, tiny_decoder

DECODER = tiny_decoder()
Table = dict[int, dict[int, float]]  # token, next token, how likely


class WatchedRecycling(TokenRecycling):
    """Keeps the tables of dictionaries beside, and compares every tree with them."""

    num_compared = 0

    def begin(self, sequence: Answer) -> None:
        super().begin(sequence)
        sequence.notes["table"] = remembered(sequence.memory)

    def observe(self, sequence: Answer, hidden: Tensor, logits: Tensor) -> None:
        super().observe(sequence, hidden, logits)
        assert sequence.last is not None
        told: Table = {}
        for node, token in enumerate(sequence.last.tree.tokens):
            if ACTIONS.first <= token <= ACTIONS.last:
                odds = logits[node, ACTIONS.columns].log_softmax(dim=0).tolist()
                known = told.setdefault(token, {})
                for behind, value in enumerate(odds, start=ACTIONS.first):
                    known[behind] = max(value, known.get(behind, -1e9))
        sequence.notes["table"].update(told)

    def draft_all(self, sequences: Sequence[Answer]) -> list[Guesses]:
        found = super().draft_all(sequences)
        for sequence, guesses in zip(sequences, found, strict=True):
            if isinstance(guesses, Branches):
                self._compare(sequence.notes["table"], sequence.tokens[-1], guesses)
        return found

    def _compare(self, table: Table, root: int, guesses: Branches) -> None:
        """Every guess is among the likeliest after its parent, as often as it has siblings."""
        tokens = [root, *guesses.tokens]
        for parent, token in enumerate(tokens):
            children = [n for n, above in enumerate(guesses.parents, start=1) if above == parent]
            known = table.get(token, {})
            best = sorted(known.values(), reverse=True)[: len(children)]
            if len(known) >= len(children):
                self.num_compared += len(children)
                assert [known[tokens[node]] for node in children] == best


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
    answer = answer_of(SessionMemory(own=own))
    TokenRecycling(fast_target(DECODER)).begin(answer)
    row = answer.notes["token-recycling"][30 - ACTIONS.first]
    best = [int(one) + ACTIONS.first for one in (-row).argsort()[:3]]
    assert best == [31, 33, 32]
    assert sorted(row.tolist(), reverse=True)[:3] == [0.0, -1.0, -2.0]
