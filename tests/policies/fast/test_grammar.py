"""The mask of FAST answers: it lets through what can become a whole chunk, and nothing else."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deft_policies.decoding.accept import accept
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.sequence import AnswerSpec, PassResult
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import DraftTree, merge
from deft_policies.errors import CheckpointError
from deft_policies.fast.answer import FORBIDDEN, AnswerGrammar, TokenGrammar
from deft_policies.fast.files import read_codec
from deft_policies.fast.grammar import DEAD, ChunkGrammar, ChunkState, read_piece, strides_of
from tests.draws import draws
from tests.policies.fast.test_codec import FOLDERS, GOLDEN

BYTES = [bytes([one]) for one in range(256)]
# Bytes that begin, go on with and end characters of every length, and some that do neither.
FEW = [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE5, 0xED, 0xF0, 0xF1, 0xF4]
few_bytes = st.lists(st.sampled_from(FEW), max_size=8).map(bytes)


def read(text: bytes) -> tuple[int, int] | None:
    """Whole characters, and bytes of the last one, which is begun; None: no UTF-8."""
    decoder = getincrementaldecoder("utf-8")()
    try:
        whole = decoder.decode(text)
    except UnicodeDecodeError:
        return None
    return len(whole), len(decoder.getstate()[0])


@given(few_bytes, few_bytes)
def test_states_of_the_grammar_are_those_of_a_decoder_of_utf8(begun: bytes, piece: bytes) -> None:
    ended, state = read_piece(0, begun)
    known = read(begun)
    assert (known is None) == (state < 0)
    if known is None:
        return
    assert (ended, state == 0) == (known[0], known[1] == 0)
    more, behind = read_piece(state, piece)
    known = read(begun + piece)
    assert (known is None) == (behind < 0)
    if known is not None:
        assert (ended + more, behind == 0) == (known[0], known[1] == 0)


def can_end(pieces: Sequence[bytes], text: bytes, num: int) -> bool:
    """Whether text becomes exactly so many characters by pieces behind it; tried out."""
    seen, ways = {text}, [text]
    while ways:
        text = ways.pop()
        known = read(text)
        if known is None or known[0] + (known[1] > 0) > num:
            continue
        if known == (num, 0):
            return True
        more = {text + one for one in pieces} - seen
        seen |= more
        ways += more
    return False


pieces_of_few = st.lists(few_bytes.filter(len), min_size=1, max_size=5, unique=True)


@settings(max_examples=200)
@given(pieces_of_few, st.integers(1, 3))
def test_a_code_may_follow_where_an_action_can_still_come_of_it(
    pieces: list[bytes], num: int
) -> None:
    if not can_end(pieces, b"", num):
        with pytest.raises(CheckpointError, match="can be written"):
            ChunkGrammar(pieces, num)
        return
    grammar = ChunkGrammar(pieces, num)
    ways: list[tuple[bytes, ChunkState]] = [(b"", grammar.start)]
    while ways:
        text, state = ways.pop()
        allowed = grammar.allowed(state).tolist()
        assert allowed == [can_end(pieces, text + one, num) for one in pieces]
        assert any(allowed) != grammar.is_whole(state)
        some = [code for code, one in enumerate(allowed) if one]
        assert grammar.only_code(state) == (some[0] if len(some) == 1 else None)
        for code, piece in enumerate(pieces):
            behind = grammar.after(state, code)
            assert (behind != DEAD) == allowed[code]
            if allowed[code]:
                ways.append((text + piece, behind))


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("num", [7, 56])
def test_a_published_kind_of_tokenizer_can_go_on_from_everywhere(folder: str, num: int) -> None:
    codec, random = read_codec(GOLDEN / folder), np.random.default_rng(num)
    grammar = ChunkGrammar(codec.pieces, num)
    for _ in range(100):
        state, codes = grammar.start, list[int]()
        while not grammar.is_whole(state):
            codes.append(int(random.choice(np.flatnonzero(grammar.allowed(state)))))
            state = grammar.after(state, codes[-1])
        assert len(codec.coefficients(codes)) == num


def test_a_chunk_that_nobody_writes_is_refused() -> None:
    with pytest.raises(CheckpointError, match="more than the 4096"):
        ChunkGrammar(BYTES, 10**9)


@given(st.text(max_size=6), st.text(max_size=6), few_bytes)
def test_equal_strides_are_the_same_coefficient(one: str, other: str, begun: bytes) -> None:
    strides = strides_of(BYTES)

    def stride(text: bytes) -> int:
        return sum(strides[byte] for byte in text)

    assert stride(one.encode()) == 4 * len(one)
    assert (stride(one.encode()) == stride(other.encode())) == (len(one) == len(other))
    known = read(begun)
    if known is not None:
        ended, state = read_piece(0, begun)
        missing = (0, 1, 2, 3, 2, 2, 3, 3)[state]
        assert stride(begun) == 4 * (ended + (missing > 0)) + missing


# Answers of three coefficients, in a vocabulary in which codes are 3, 4, ... and 1 is the end.
PIECES = [b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xa9a", b"abab", b"\xc3\xa9\xc3"]
END, FIRST_CODE, NUM_TOKENS, NUM = 1, 3, 12, 3


@cache
def shared() -> TokenGrammar:
    columns = torch.arange(FIRST_CODE, FIRST_CODE + len(PIECES))
    return TokenGrammar(ChunkGrammar(PIECES, NUM), columns, END)


def is_action(tokens: Sequence[int]) -> bool:
    codes = [one - FIRST_CODE for one in tokens[:-1]]
    if tokens[-1] != END or not all(0 <= one < len(PIECES) for one in codes):
        return False
    return read(b"".join(PIECES[one] for one in codes)) == (NUM, 0)


Logits = Callable[[Sequence[int]], Tensor]


def drawn_model(seed: int) -> Logits:
    """Logits that depend on how many tokens came before and on the last one. It likes actions."""
    table = np.random.default_rng(seed).normal(size=(13, NUM_TOKENS, NUM_TOKENS))
    table[:, :, FIRST_CODE:] += 1.0
    table[2:, :, END] += 2.0
    logits = torch.from_numpy(table.astype(np.float32))
    return lambda tokens: logits[len(tokens), tokens[-1] if tokens else 0]


def write(
    logits: Logits, grammar: AnswerGrammar | None = None, draft: Sequence[int] = (), most: int = 12
) -> Answer:
    """Decode an answer as the engine does, with a draft as a chain behind every token."""
    answer = Answer(find_method("lossless"), AnswerSpec(most, END))
    answer.limit = most
    while not answer.is_done:
        first = not answer.records
        committed = [0] if first else answer.tokens[answer.num_cached :]
        rest = list(draft[len(answer.tokens) :])[: answer.room]
        tree = merge(committed, [("draft", [rest] if rest else [])], 64)
        rows = []
        for node in range(tree.num_nodes):
            path = [tree.tokens[one] for one in tree.path_to(node)]
            rows.append(logits([*answer.tokens[: answer.num_cached], *path[first:]]))
        scores = torch.stack(rows)
        if grammar is not None:
            scores = grammar.adjust(scores, answer, tree)
        best = scores.argmax(dim=1).tolist()
        found = PassResult(answer.number, best, best, True)
        path, bonus = accept(answer, tree, found)
        record = PassRecord(first, tree, best, path, bonus, [])
        answer.commit(record, found)
        if grammar is not None and not answer.is_done:
            answer.extend(grammar.forced(answer.tokens), 63)
    return answer


def free_tokens(logits: Logits, answer: Answer) -> list[int]:
    """What an answer's model prefers in each state where several codes could follow."""
    found, text = list[int](), b""
    for index, token in enumerate(answer.tokens):
        several = sum(can_end(PIECES, text + one, NUM) for one in PIECES) > 1
        found.append(int(logits(answer.tokens[:index]).argmax()) if several else token)
        text += PIECES[token - FIRST_CODE] if token != END else b""
    return found


def test_what_is_said_of_answers_is_what_the_model_preferred() -> None:
    num_actions = 0
    for seed in range(500):
        logits, grammar = drawn_model(seed), AnswerGrammar(shared())
        free, masked = write(logits), write(logits, grammar)
        assert is_action(masked.tokens)
        assert grammar.free_tokens(masked) == free_tokens(logits, masked)
        if is_action(free.tokens):
            num_actions += 1
            assert masked.tokens == free.tokens == grammar.free_tokens(masked)
    assert num_actions > 5


def test_drawn_answers_change_only_where_they_are_no_action() -> None:
    chunk, num_actions = shared().chunk, 0
    for seed in range(draws(2500)):
        logits, free = drawn_model(seed), list[int]()
        while len(free) < 12 and END not in free:
            free.append(int(logits(free).argmax()))
        state, masked = chunk.start, list[int]()
        while not chunk.is_whole(state):
            codes = logits(masked)[FIRST_CODE : FIRST_CODE + len(PIECES)].numpy()
            code = int(np.where(chunk.allowed(state), codes, -np.inf).argmax())
            masked.append(FIRST_CODE + code)
            state = chunk.after(state, code)
        assert is_action([*masked, END])
        if is_action(free):
            num_actions += 1
            assert [*masked, END] == free
    assert num_actions > draws(50)


def test_drafts_change_no_masked_answer_and_nothing_that_is_said_of_it() -> None:
    random = np.random.default_rng(0)
    for seed in range(500):
        logits, grammar = drawn_model(seed), AnswerGrammar(shared())
        plain = write(logits, grammar)
        right = [*plain.tokens, 0, 0]
        draft = [
            int(random.integers(NUM_TOKENS)) if random.random() < 0.3 else one for one in right
        ]
        drafted = AnswerGrammar(shared())
        answer = write(logits, drafted, draft)
        assert answer.tokens == plain.tokens
        assert drafted.free_tokens(answer) == grammar.free_tokens(plain)
        assert answer.num_passes <= plain.num_passes


def test_the_end_and_codes_that_alone_can_follow_cost_no_pass() -> None:
    letters = drawn_model(1)

    def prefers(token: int) -> Logits:
        def logits(tokens: Sequence[int]) -> Tensor:
            found = letters(tokens).clone()
            found[token] = 9.0
            return found

        return logits

    a = FIRST_CODE
    answer = write(prefers(a), AnswerGrammar(shared()))
    assert answer.tokens == [a, a, a, END]
    assert answer.num_passes == 3
    begun = FIRST_CODE + PIECES.index(b"\xc3\xa9\xc3")
    ends = FIRST_CODE + PIECES.index(b"\xa9a")
    two = AnswerGrammar(
        TokenGrammar(ChunkGrammar([b"\xc3\xa9\xc3", b"\xa9a"], 3), torch.tensor([begun, ends]), END)
    )
    answer = write(letters, two)
    assert answer.tokens == [begun, ends, END]
    assert answer.num_passes == 1


def test_what_may_not_follow_is_far_below_and_finite() -> None:
    answer = Answer(find_method("lossless"), AnswerSpec(12, END))
    tree = DraftTree([0, FIRST_CODE + 6, FIRST_CODE], [-1, 0, 1], ["", "x", "x"])
    logits = torch.arange(3 * NUM_TOKENS, dtype=torch.float32).view(3, NUM_TOKENS)
    found = AnswerGrammar(shared()).adjust(logits, answer, tree)
    allowed = [FIRST_CODE + code for code in (0, 1, 2, 3, 7)]  # of an empty answer
    assert found[0, allowed].tolist() == logits[0, allowed].tolist()
    others = [one for one in range(NUM_TOKENS) if one not in allowed]
    assert set(found[0, others].tolist()) == {torch.tensor(FORBIDDEN).item()}
    assert found[1:].tolist() == logits[1:].tolist()  # behind a guess that cannot stand
