"""Spec-VLA's own loop, beside one written from its description with lists and nothing else.

The twin keeps a sequence and a pending root, looks at leaves one by one and counts as the released
code does: the longest row wins, the first of equals, and only then is it cut at the seventh token.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from deft_core.types import DecodeTrace
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.target import Prompt
from deft_policies.decoding.tree import Branches, merge
from deft_policies.methods.spec_vla import WithinIds
from deft_policies.model.llama import LlamaDecoder
from scripts.reproduce.published import (
    PUBLISHED_BEHIND,
    PUBLISHED_SHARES,
    fit_acceptance,
    predicted_shares,
)
from tests.policies.decoding.scripts import (
    AnswerTarget,
    Decoding,
    Guess,
    ScriptedDrafts,
    Session,
    blank_prompts,
)
from tests.policies.decoding.trees import random_case
from tests.tiny_target import (
    LENGTH,
    TinyTarget,
    fast_target,
    next_token,
    random_prompts,
    tiny_decoder,
)

LEVELS, RADIUS = 5, 4


def guesses_of(seed: int, answer: tuple[int, ...]) -> Guess:
    """Two or three guesses everywhere, some right, some near, some wrong; the same for the same."""

    def guess(row: int, position: int, before: tuple[int, ...]) -> list[int]:
        rng = random.Random(f"{seed} {row} {position} {before}")
        right = answer[min(position, LENGTH - 1)]
        return [max(0, min(71, right + rng.choice([0, 0, 2, -3, 4, 9, -30]))) for _ in range(2)]

    return guess


def published(
    decoder: LlamaDecoder, prompt: Tensor, guess: Guess, radius: int
) -> tuple[list[int], list[int]]:
    """Tokens and accepted lengths, counted as the released code counts them."""

    def wanted(tokens: list[int]) -> int:
        return next_token(decoder, prompt, tokens)

    committed: list[int] = []  # "new_token" is its length
    root, lengths = wanted([]), []
    while len(committed) <= LENGTH - 1:
        tree = grown(guess, (*committed, root))
        rows = [path for node, path in enumerate(tree) if is_leaf(tree, node)]
        kept = [agreeing(wanted, [*committed, root], path_of(tree, row), radius) for row in rows]
        best = kept.index(max(kept))
        num = kept[best]
        if len(committed) + num > LENGTH - 1:
            num = max(LENGTH - 1 - len(committed), 0)
        path = path_of(tree, rows[best])[:num]
        committed += [root, *path]
        lengths.append(num)
        root = wanted(committed) if len(committed) < LENGTH else -1
    return committed[:LENGTH], lengths


Node = tuple[int, int]  # token, parent


def grown(guess: Guess, committed: tuple[int, ...]) -> list[Node]:
    nodes: list[Node] = [(committed[-1], -1)]
    paths: list[tuple[int, ...]] = [()]
    index = 0
    while index < len(nodes) and len(nodes) < 24:
        if len(paths[index]) < LEVELS:
            place = len(committed) + len(paths[index])
            for token in guess(0, place, committed + paths[index]):
                if len(nodes) < 24:
                    nodes.append((token, index))
                    paths.append((*paths[index], token))
        index += 1
    return nodes


def is_leaf(tree: list[Node], node: int) -> bool:
    return node > 0 and all(parent != node for _, parent in tree)


def path_of(tree: list[Node], node: Node) -> list[int]:
    path = []
    while node[1] >= 0:
        path.append(node[0])
        node = tree[node[1]]
    return path[::-1]


def agreeing(
    wanted: Callable[[list[int]], int], before: list[int], path: list[int], radius: int
) -> int:
    for depth, token in enumerate(path):
        if abs(wanted(before + path[:depth]) - token) > radius:
            return depth
    return len(path)


@pytest.mark.parametrize("radius", [0, RADIUS])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow target"])
def test_the_published_loop_equals_its_twin_case_by_case(radius: int, slow: bool) -> None:
    decoder = tiny_decoder()
    target = TinyTarget(decoder) if slow else fast_target(decoder)
    seen_last = 0
    for seed in range(6 if slow else 24):
        prompts = random_prompts(decoder, [3], seed=seed)
        prompt = prompts[0].embeds
        answer = plain(decoder, prompt)
        guess = guesses_of(seed, answer)
        tokens, lengths = published(decoder, prompt, guess, radius)
        trace = decode(target, prompts, guess, radius)
        assert list(trace.tokens) == tokens, seed
        assert list(trace.accepted_lengths[1:]) == lengths, seed
        assert trace.passes[0].accepted_length == 0
        seen_last += sum(trace.accepted_lengths) + len(lengths) == LENGTH and lengths[-1] > 0
    assert seen_last > 0  # drafts of the seventh token did count


def plain(decoder: LlamaDecoder, prompt: Tensor) -> tuple[int, ...]:
    tokens: list[int] = []
    while len(tokens) < LENGTH:
        tokens.append(next_token(decoder, prompt, tokens))
    return tuple(tokens)


def decode(target: object, prompts: list[Prompt], guess: Guess, radius: int) -> DecodeTrace:
    method = find_method(f"spec-vla-published:radius={radius}")
    drafts = ScriptedDrafts(guess, max_depth=LEVELS)
    return Decoding(target, method, None, drafts).decode(prompts, Session.of(1))[0]


def test_the_seventh_token_may_be_a_draft_in_the_published_loop() -> None:
    """All guesses right: 1 + 5 + 1 tokens take two passes with drafts. None right: seven."""
    right = (1, 2, 3, 4, 5, 6, 7)
    for is_right, expected in ((True, [5, 0]), (False, [0] * 7)):
        target = AnswerTarget()
        target.wanted = [right]
        told = right if is_right else (90,) * LENGTH
        guess = partial(told_token, told)
        trace = decode(target, blank_prompts(1), guess, radius=0)
        assert list(trace.accepted_lengths[1:]) == expected
        assert trace.tokens == right
        assert trace.relaxed_share == 0


def told_token(told: tuple[int, ...], row: int, place: int, before: tuple[int, ...]) -> list[int]:
    return [told[min(place, LENGTH - 1)]]


def test_our_loop_never_drafts_for_the_last_token() -> None:
    assert find_method("spec-vla").rule.tokens_behind == 0
    assert find_method("spec-vla-published").rule.tokens_behind == 1


def test_a_whole_action_may_end_with_a_path_that_won_beyond_its_end() -> None:
    """73 stands within 9 of the last token, 70; it comes first, but 70 goes on behind the end."""

    def guess(row: int, place: int, before: tuple[int, ...]) -> list[int]:
        if place < LENGTH - 1:
            return [99]  # never near
        return [73, 70] if place == LENGTH - 1 else [70] * (before[-1] == 70)

    target = AnswerTarget()
    target.wanted = [(10, 20, 30, 40, 50, 60, 70)]
    trace = decode(target, blank_prompts(1), guess, radius=9)
    assert trace.tokens == (10, 20, 30, 40, 50, 60, 70)
    assert trace.accepted_lengths[-1] == 1


def test_the_longest_path_is_cut_after_it_was_chosen() -> None:
    """5 of 7 committed; leaf 33 stands within 9 of 30, beside the exact path 30-31-32."""
    tree = merge([29], [("test", Branches([33, 30, 31, 32], [0, 0, 2, 3]))], 64)
    said = torch.tensor([30, 50, 31, 32, 40])
    logits = torch.nn.functional.one_hot(said, 60).float()
    case = replace(random_case(0), tree=tree, logits=logits)
    case.answer.tokens = case.answer.target_tokens = [25] * 5
    ours, theirs = (case.committed(one) for one in (WithinIds(9), WithinIds(9, loop="published")))
    assert ours == ([0, 1], 50)
    assert theirs == ([0, 2], 31)


@pytest.mark.parametrize("suite", list(PUBLISHED_SHARES))
def test_the_published_loop_explains_the_strict_rows_of_table_2(suite: str) -> None:
    """Six chances, one per token, fitted to six shares."""
    shares = PUBLISHED_SHARES[suite]
    chances, deviation = fit_acceptance(shares, PUBLISHED_BEHIND)
    assert all(0.0 <= chance <= 1.0 for chance in chances)
    assert deviation < 0.002


def test_predicted_shares_are_what_the_loops_do() -> None:
    """alpha = 0.4 and a gripper that is nearly always guessed, as the tables say."""
    chances = (0.4, 0.4, 0.4, 0.4, 0.4, 0.98)
    shares = predicted_shares(chances, PUBLISHED_BEHIND)
    assert shares[0] == pytest.approx(0.5166, abs=1e-4)
    assert sum(share * (1 + n) for n, share in enumerate(shares)) == pytest.approx(1.737, abs=1e-3)
    lean = predicted_shares(chances, 0)
    assert lean[0] == pytest.approx(0.66, abs=1e-3)


def test_predicted_shares_equal_counted_ones() -> None:
    """The decode loop itself, with scripted guesses that are right by these chances."""
    chances, num_actions = (0.3, 0.6, 0.5, 0.8, 0.4, 0.9), 400
    target, rng = AnswerTarget(), random.Random(5)
    target.wanted = [(1, 2, 3, 4, 5, 6, 7)]
    for loop in ("lean", "published"):
        method = find_method(f"spec-vla:radius=0,loop={loop}")

        def guess(row: int, place: int, before: tuple[int, ...]) -> list[int]:
            return [place + 1 if place < 7 and rng.random() < chances[place - 1] else 90]

        drafts = ScriptedDrafts(guess, max_depth=LEVELS)
        drafted = Decoding(target, method, None, drafts)
        counts = torch.zeros(LEVELS + 1)
        for _ in range(num_actions):
            trace = drafted.decode(blank_prompts(1), Session.of(1))[0]
            for one in trace.checked_passes:
                counts[one.accepted_length] += 1
        found = counts / counts.sum()
        expected = torch.tensor(predicted_shares(chances, method.rule.tokens_behind))
        assert float((found - expected).abs().max()) < 0.04
