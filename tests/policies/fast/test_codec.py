"""FAST codes to actions and back, as the original's own class does both."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deft_policies.errors import NoActionError
from deft_policies.fast.codec import FastCodec, cosines, to_coefficients
from deft_policies.fast.files import bytes_of_piece, read_codec

pytestmark = pytest.mark.promise

GOLDEN = Path(__file__).parents[2] / "golden/fast"
FOLDERS = ("bytes", "characters")
POLICIES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "answers.json").read_text())


def codec_of(policy: str) -> FastCodec:
    return read_codec(GOLDEN / POLICIES[policy]["folder"])


@pytest.mark.parametrize("policy", POLICIES)
def test_codes_are_the_originals_actions(policy: str) -> None:
    about, codec = POLICIES[policy], codec_of(policy)
    size = about["num_steps"], about["dim"]
    for answer in about["answers"]:
        codes, coefficients = answer["codes"], answer["coefficients"]
        if "normalised" in answer:
            assert codec.coefficients(codes) == coefficients
            np.testing.assert_allclose(
                codec.decode(codes, *size), answer["normalised"], rtol=0, atol=1e-12
            )
            continue
        with pytest.raises(NoActionError):
            codec.decode(codes, *size)
        if max(coefficients) < 65533 + codec.min_token:
            assert codec.coefficients(codes) == coefficients
        else:
            with pytest.raises(NoActionError, match="a coefficient is broken"):
                codec.coefficients(codes)


@pytest.mark.parametrize("policy", POLICIES)
def test_actions_are_codes_that_mean_them(policy: str) -> None:
    codec = codec_of(policy)
    for answer in POLICIES[policy]["answers"]:
        if "normalised" in answer:
            codes = codec.encode(np.array(answer["normalised"]))
            assert codec.coefficients(codes) == answer["coefficients"]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_coefficient_begins_in_one_code(policy: str) -> None:
    """A character may be spread over codes; the words around an answer are no codes."""
    codec = codec_of(policy)
    for answer in POLICIES[policy]["answers"]:
        if "normalised" not in answer:
            continue
        codes = answer["codes"]
        begun = codec.begun([None, *codes, None])
        assert (begun[0], begun[-1]) == ((), ())
        assert [one for some in begun for one in some] == answer["coefficients"]
        for end in range(len(codes) + 1):
            text = codec.bytes_of(codes[:end]).decode(errors="replace")
            assert sum(map(len, begun[: end + 1])) == len(text)


def drawn(lowest: int, highest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(lowest, highest), min_size=1, max_size=40)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_own_tokenizer_writes_the_same_codes(folder: str) -> None:
    codec = read_codec(GOLDEN / folder)
    theirs = Tokenizer.from_file(str(GOLDEN / folder / "tokenizer.json"))

    @given(drawn(-30, 30))
    def check(coefficients: list[int]) -> None:
        text = "".join(chr(one - codec.min_token) for one in coefficients)
        codes = theirs.encode(text).ids
        try:
            ours = codec.encode_coefficients(coefficients)
        except ValueError:  # theirs has left something out
            assert b"".join(codec.pieces[one] for one in codes) != text.encode()
        else:
            assert ours == codes
            assert codec.coefficients(ours) == coefficients

    check()


def test_any_bytes_are_what_utf8_says_or_no_action() -> None:
    codec = read_codec(GOLDEN / "bytes")

    @given(st.lists(st.integers(0, len(codec.pieces) - 1), max_size=12))
    def check(codes: list[int]) -> None:
        text = codec.bytes_of(codes).decode(errors="replace")
        if "\ufffd" in text:
            with pytest.raises(NoActionError):
                codec.coefficients(codes)
        else:
            assert codec.coefficients(codes) == [ord(one) + codec.min_token for one in text]

    check()


def test_a_piece_is_bytes_or_itself() -> None:
    assert bytes_of_piece("\u0120") == b" "  # the byte of a space has another character
    assert bytes_of_piece("\u00c5\u00a2") == b"\xc5\xa2"
    assert bytes_of_piece(" ") == b" "
    assert bytes_of_piece("\x85") == b"\xc2\x85"
    assert bytes_of_piece("\u00c5\x85") == b"\xc3\x85\xc2\x85"


def slow_dct(rows: list[list[float]]) -> list[list[float]]:
    """By its definition, number by number."""
    size, dim = len(rows), len(rows[0])
    found = []
    for frequency in range(size):
        factor = math.sqrt((1 if frequency == 0 else 2) / size)
        weights = [math.cos(math.pi * (2 * t + 1) * frequency / (2 * size)) for t in range(size)]
        found.append(
            [factor * sum(weights[t] * rows[t][one] for t in range(size)) for one in range(dim)]
        )
    return found


@pytest.mark.parametrize("num_steps", [1, 5, 8, 16])
def test_frequencies_are_those_of_the_definition(num_steps: int) -> None:
    actions = np.random.default_rng(num_steps).uniform(-1, 1, (num_steps, 3))
    frequencies = cosines(num_steps) @ actions
    np.testing.assert_allclose(frequencies, slow_dct(actions.tolist()), rtol=0, atol=1e-12)
    np.testing.assert_allclose(cosines(num_steps).T @ frequencies, actions, rtol=0, atol=1e-12)
    rounded = np.rint(10 * frequencies).astype(int).ravel().tolist()
    assert to_coefficients(actions, 10) == rounded


def test_halves_are_rounded_to_even() -> None:
    assert to_coefficients(np.array([[0.05, 0.15, -0.05, -0.15, 0.25]]), 10) == [0, 2, 0, -2, 2]


def test_what_is_below_the_alphabet_is_its_lowest() -> None:
    codec = read_codec(GOLDEN / "bytes")  # begins at -354
    assert codec.coefficients(codec.encode_coefficients([-355, -9000, 0])) == [-354, -354, 0]


@pytest.mark.parametrize(
    ("coefficients", "problem"),
    [
        ([0x10FFFF + 1], "too large"),
        ([0xD800 - 125], "no character"),  # a surrogate
        ([5000], "no piece"),
    ],
)
def test_coefficients_without_codes_are_refused(coefficients: list[int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_codec(GOLDEN / "characters").encode_coefficients(coefficients)


@pytest.mark.parametrize("wild", [math.nan, math.inf, 1e300])
def test_actions_that_were_not_normalised_are_refused(wild: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        read_codec(GOLDEN / "bytes").encode(np.array([[0.0, wild]]))
