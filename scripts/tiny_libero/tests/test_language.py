"""What is said to the policy, and what it says, in words that are one token each."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from deft_policies.checkpoint.config import load_tokenizer
from deft_policies.model.prompt import PromptTemplate
from tiny_libero_recipe.language import (
    CARRYING,
    PATTERNS,
    PLACES,
    SUBTASKS,
    TAGS,
    THINGS,
    Facts,
    reasoning,
    sentence,
    spoken,
    vocabulary,
)
from tiny_libero_recipe.tokenizer import build_tokenizer, write_tokenizer

TOKENIZER = build_tokenizer(vocabulary(), TAGS)
FACTS = Facts(
    thing="milk",
    place="basket",
    phase="approach",
    label=np.array([0.5, -0.4, 0.05, 0.0, 0.0, -0.2, 1.0], np.float32),
    way=np.array([0.104, -0.2, -0.31], np.float32),
    opening=0.08,
    thing_box=np.array([0.25, 0.5, 0.3, 0.625], np.float32),
    place_box=np.array([0.1, 0.4, 0.3, 0.7], np.float32),
    gripper=np.array([0.5, 0.25], np.float32),
)


def test_a_reasoning_says_what_the_simulator_knows():
    assert reasoning(FACTS) == (
        "Put the milk in the basket. PLAN: reach, grasp, lift, carry, release. "
        "VISIBLE OBJECTS: milk [64, 128, 80, 160], basket [24, 104, 80, 176] "
        "SUBTASK REASONING: The hand is not over the milk yet. SUBTASK: reach the milk "
        "MOVE REASONING: The milk is 10cm ahead, 20cm right, 30cm below. "
        "MOVE: move forward right, rotate clockwise GRIPPER POSITION: [128, 64] ACTION:"
    )


def test_the_gripper_is_spoken_of_when_it_changes():
    closing = np.array([0, 0, 0, 0, 0, 0, 0.0], np.float32)
    assert "MOVE: close gripper G" in reasoning(replace(FACTS, label=closing))
    assert "MOVE: stop G" in reasoning(replace(FACTS, label=closing, opening=0.04))
    opening = np.array([0, 0, 0, 0, 0, 0, 1.0], np.float32)
    assert "MOVE: open gripper G" in reasoning(replace(FACTS, label=opening, opening=0.04))


def all_reasonings(each: int = 20) -> list[str]:
    generator = np.random.default_rng(0)
    return [
        reasoning(
            Facts(
                thing=thing,
                place=place,
                phase=phase,
                label=generator.normal(0, 0.3, 7),
                way=generator.normal(0, 0.3, 3),
                opening=generator.uniform(0, 0.08),
                thing_box=generator.uniform(-0.1, 1.1, 4),
                place_box=generator.uniform(-0.1, 1.1, 4),
                gripper=generator.uniform(-0.1, 1.1, 2),
            )
        )
        for thing, place, phase, _ in product(THINGS, PLACES, SUBTASKS, range(each))
    ]


def test_every_word_of_a_reasoning_is_one_token_and_no_text_is_lost():
    for text in all_reasonings():
        found = TOKENIZER.encode(text, add_special_tokens=False)
        assert not [piece for piece in found.tokens if piece.startswith("<0x")], text
        words = len(re.sub("|".join(f" {tag}" for tag in TAGS), " tag", text).split())
        assert len(found.ids) == words <= 70
        assert TOKENIZER.decode(found.ids) == text


def test_every_sentence_is_made_of_words_that_it_knows():
    for pattern, thing, place in product(PATTERNS, THINGS, PLACES):
        told = pattern.format(thing=thing, place=place)
        for prompt in (PromptTemplate.OPENVLA.fill(told), PromptTemplate.ECOT.fill(told)):
            found = TOKENIZER.encode(prompt)
            assert len(found.ids) == len(told.split()) + 3, "its start, its end and <s>"
            assert TOKENIZER.decode(found.ids) == prompt


def test_a_garbled_word_names_nothing():
    generator = np.random.default_rng(0)
    known = set(vocabulary())
    for _ in range(200):
        words = sentence("orange juice", "basket", generator, plain=0.0, noise=1.0).split()
        assert "orange juice" in " ".join(words)
        assert "basket" in words
        assert sum(word not in known for word in words) <= 1


def test_libero_s_own_sentence_is_the_first_and_as_frequent_as_said():
    generator = np.random.default_rng(0)
    said = [sentence("milk", "basket", generator, plain=0.4) for _ in range(500)]
    assert 0.3 < said.count("pick up the milk and place it in the basket") / 500 < 0.5
    assert len(set(said)) == len(PATTERNS)


@pytest.mark.parametrize(
    ("name", "said"),
    [("alphabet_soup_1", "alphabet soup"), ("basket_1_contain_region", "basket")],
)
def test_names_of_the_simulator_are_spoken_plainly(name, said):
    assert spoken(name) == said


def test_phases_with_the_thing_in_hand_look_for_the_place():
    for phase in SUBTASKS:
        over = "basket" if phase in CARRYING else "milk"
        assert f"MOVE REASONING: The {over} is" in reasoning(replace(FACTS, phase=phase))


def test_other_libraries_read_it_alike(tmp_path: Path):
    from transformers import AutoTokenizer

    write_tokenizer(TOKENIZER, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in (PromptTemplate.ECOT.fill("pick up the milk"), *all_reasonings(1)):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
