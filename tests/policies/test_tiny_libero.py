"""The policy that ships: it is whole, small, says what it said, and speculation changes nothing."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from deft_core.types import ActOptions, Observation
from deft_policies import catalog
from deft_policies import tiny_libero as bundle
from deft_policies.base import PolicyRequest
from deft_policies.commands.act import load_image
from deft_policies.errors import PolicyError
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions, Precision
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from tests.draws import draws

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny_libero"
CLEAR_MARGIN = 1e-3  # below it, another processor may round to another token


@cache
def policy(precision: Precision = Precision.FLOAT32) -> VlaPolicy:
    options = ModelOptions(device="cpu", is_guarded=False, precision=precision)
    return load_policy(bundle.complete(options))


def cases() -> list[dict[str, object]]:
    """One episode's frames in order, with the answers of `deft act`."""
    return [json.loads(line) for line in (GOLDEN / "cases.jsonl").read_text().splitlines()]


def thinking_cases() -> list[dict[str, object]]:
    """Every fourth of them has what it says where it thinks aloud."""
    return [case for case in cases() if "thinking_tokens" in case]


def play(
    decoding: str,
    aloud: bool = False,
    precision: Precision = Precision.FLOAT32,
    most: int | None = None,
) -> list[tuple[tuple[int, ...], int]]:
    """Tokens and passes for the stored frames, or the first of them, as one robot's session."""
    memory, answers = SessionMemory(), []
    for case in (thinking_cases() if aloud else cases())[:most]:
        observation = Observation(load_image(GOLDEN / str(case["image"])), str(case["instruction"]))
        options = ActOptions(decoding=decoding, want_trace=True, want_reasoning=aloud)
        (answer,) = policy(precision).act([PolicyRequest(observation, memory, options)])
        memory, trace = answer.memory, answer.chunk.trace
        assert trace is not None
        answers.append((tuple(trace.tokens), trace.num_passes))
    return answers


@pytest.mark.promise
def test_tiny_libero_answers_as_it_did_when_it_was_shipped():
    for case, (tokens, passes) in zip(cases(), play("autoregressive"), strict=True):
        assert passes == 7
        for dim, margin in enumerate(case["margins"]):
            if margin < CLEAR_MARGIN:
                break  # what follows depends on this token
            assert tokens[dim] == case["tokens"][dim]


def test_tiny_libero_thinks_aloud_as_it_did_when_it_was_shipped():
    for case, (tokens, passes) in zip(thinking_cases(), play("autoregressive", True), strict=True):
        assert passes == len(tokens)
        for wanted, margin, token in zip(
            case["thinking_tokens"], case["thinking_margins"], tokens, strict=False
        ):
            if margin < CLEAR_MARGIN:
                break
            assert token == wanted


def test_thoughts_of_tiny_libero_are_drafted_from_the_last_ones_and_stay_the_same():
    plain, fast = play("autoregressive", True), play("lossless", True)
    assert [tokens for tokens, _ in fast] == [tokens for tokens, _ in plain]
    later = slice(1, None)  # the first frame of a session has nothing to draft from
    passes = [sum(one for _, one in answers[later]) for answers in (plain, fast)]
    assert passes[1] < 0.4 * passes[0]


def words(tokens: tuple[int, ...]) -> list[int]:
    """The text of an answer, without the action at its end."""
    actions = policy().model.target.action_tokens
    return [token for token in tokens if not actions.first <= token <= actions.last]


def test_words_are_exact_under_spec_vlas_rule_on_raw_ids():
    """Seen for real: "GRIPPER POSITION: [128, 64]" became "[128, 80, 64]", and the action moved."""
    frame = load_image(GOLDEN.parents[2] / "examples" / "frame.png")
    observation = Observation(frame, "pick up the butter and place it in the basket")
    texts = []
    for decoding in ("autoregressive", "spec-vla"):
        options = ActOptions(decoding=decoding, want_trace=True, want_reasoning=True)
        (answer,) = policy().act([PolicyRequest(observation, options=options)])
        texts.append(words(answer.chunk.trace.tokens))
    assert texts[0] == texts[1]


def test_text_on_writes_other_words_in_fewer_passes_and_still_acts():
    exact, relaxed = (
        play(f"fly:theta=0.1,window=2,drafts=previous-answer{text}", aloud=True)
        for text in ("", ",text=on")
    )
    assert any(words(a) != words(b) for (a, _), (b, _) in zip(exact, relaxed, strict=True))
    assert sum(passes for _, passes in relaxed) < sum(passes for _, passes in exact)
    actions = policy().model.target.action_tokens
    for tokens, _ in relaxed:
        assert all(actions.first <= token <= actions.last for token in tokens[-8:-1])


@pytest.mark.promise
def test_lossless_answers_equal_plain_decoding_in_fewer_passes():
    plain, fast = play("autoregressive"), play("lossless")
    assert [tokens for tokens, _ in fast] == [tokens for tokens, _ in plain]
    assert sum(passes for _, passes in fast) < 0.75 * sum(passes for _, passes in plain)


@pytest.mark.parametrize("aloud", [False, True], ids=["acting", "thinking"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_lossless_answers_equal_plain_decoding_in_bfloat16(num_threads: int, aloud: bool):
    most = 1 + draws(1) if aloud else draws(3)  # slow where a processor has no such products
    threads = torch.get_num_threads()
    policy(Precision.BFLOAT16)  # loading sets a number of its own
    torch.set_num_threads(num_threads)
    try:
        plain = play("autoregressive", aloud, Precision.BFLOAT16, most)
        fast = play("lossless", aloud, Precision.BFLOAT16, most)
    finally:
        torch.set_num_threads(threads)
    assert [tokens for tokens, _ in fast] == [tokens for tokens, _ in plain]
    assert sum(passes for _, passes in fast) < 0.75 * sum(passes for _, passes in plain)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_picture_has_the_same_features_alone_and_among_others(num_threads: int):
    network = policy(Precision.BFLOAT16).model.network
    size = network.config.image.size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(8, 3 * len(network.towers), size, size, generator=generator).bfloat16()
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            for part in (network.look, network.see):  # features, and what is made of them
                alone = [part(pixels[index : index + 1]) for index in range(8)]
                for num_pictures in range(2, 9):
                    together = part(pixels[:num_pictures])
                    for index in range(num_pictures):
                        assert torch.equal(together[index], alone[index][0])
    finally:
        torch.set_num_threads(threads)


def test_relaxed_decoding_takes_fewer_passes_still():
    assert sum(passes for _, passes in play("deft")) < sum(passes for _, passes in play("lossless"))


def test_tiny_libero_has_both_heads_so_every_method_can_be_asked_for():
    methods = policy().info.decoding_methods
    assert {"lossless", "deft", "spec-vla", "fly", "lvspec", "kerv-like"} <= set(methods)


def test_the_shipped_policy_stays_small():
    def size(*folders: Path) -> int:
        return sum(file.stat().st_size for folder in folders for file in folder.rglob("*"))

    assert size(bundle.CHECKPOINT, *bundle.HEADS) <= 20e6
    assert sum(p.numel() for p in policy().model.network.parameters()) <= 12e6


def test_tiny_libero_is_the_default_unless_other_weights_are_named():
    assert catalog.default_for([]) == "tiny-libero"
    assert catalog.default_for(["--port", "1", "--decoding=deft"]) == "tiny-libero"
    assert catalog.default_for(["--checkpoint", "x"]) == "model"
    assert catalog.default_for(["--random-weights=small"]) == "model"


def test_another_checkpoint_under_its_name_is_refused():
    with pytest.raises(PolicyError, match="leave --policy tiny-libero away"):
        bundle.complete(ModelOptions(checkpoint="x"))
