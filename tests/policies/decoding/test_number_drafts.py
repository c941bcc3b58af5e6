"""Guesses from the last answer, where answers are rows of numbers as text."""

from deft_policies.decoding.drafts.numbers import (
    END,
    SPACE,
    find_run,
    guess_numbers,
    moved,
    rest_of,
    split_numbers,
)
from deft_policies.decoding.drafts.previous_answer import share_beginnings

LAST = [(1,), (2, 3), (4,), (5,)]  # two rows of two numbers


def tokens_of(text: str, ends: bool = False) -> list[int]:
    return [SPACE if one == " " else int(one) for one in text] + [END] * ends


def test_tokens_are_split_into_numbers() -> None:
    assert split_numbers(tokens_of("1 23 4 5", ends=True)) == LAST
    assert split_numbers([]) == [()]
    assert split_numbers(tokens_of("1 ")) == [(1,), ()]


def test_the_last_row_stands_for_the_new_ones() -> None:
    assert moved(LAST, 1, 2) == [(4,), (5,), (4,), (5,)]
    assert moved(LAST, 0, 2) == LAST


def test_a_guess_goes_on_at_the_number_and_the_digit_that_is_written() -> None:
    assert rest_of(LAST, 1, 1) == tokens_of("3 4 5", ends=True)
    assert rest_of(LAST, 3, 1) == [END]
    assert rest_of(LAST, 4, 0) == [END]


def test_the_longest_run_says_where_the_last_answer_goes_on() -> None:
    assert find_run(LAST, [(2, 3), (4,), ()], 2) == 3
    assert find_run(LAST, [(2, 3), (4,), (6,)], 2) is None
    assert find_run(LAST, [(9,), ()], 2) is None


def test_chains_are_the_run_the_moved_answer_and_the_answer_as_it_was() -> None:
    chains = guess_numbers(LAST, tokens_of("23 4 "), 1, 2)
    assert chains == [
        tokens_of("5", ends=True),
        tokens_of("4 5", ends=True),
        tokens_of("4 5", ends=True),
    ]
    assert guess_numbers([()], [], 1, 2) == []


def test_chains_share_what_begins_alike() -> None:
    tokens, parents, nodes = share_beginnings([[1, 2, 3], [1, 4]], 8, 2)
    children = {(above, token) for above, token in zip(parents, tokens, strict=True)}
    assert len(children) == 4
    assert all(above <= node for node, above in enumerate(parents))
    assert [[tokens[node - 1] for node in path] for path in nodes] == [[1, 2, 3], [1, 4]]
    assert len(share_beginnings([[1] * 20, [2] * 20], 8, 2)[0]) == 8
