import json
import shutil
from pathlib import Path

import pytest

from deft_policies.checkpoint.config import load_encoder
from deft_policies.errors import CheckpointError
from deft_policies.model.prompt import PromptEncoder, PromptTemplate
from tests import golden
from tiny_libero_recipe.tokenizer import build_tokenizer, write_tokenizer

INSTRUCTIONS = ("pick up the red mug", "open the top drawer", "put the bowl on the stove")
LLAMA_VOCABULARY = 32000


def golden_encoder(template: PromptTemplate = PromptTemplate.OPENVLA) -> PromptEncoder:
    return load_encoder(golden.TINY_OPENVLA, template, LLAMA_VOCABULARY)


def prompt_cases(*templates: str) -> list[golden.PromptCase]:
    return [case for case in golden.prompts() if case.template in templates]


@pytest.mark.parametrize("case", prompt_cases("openvla", "v01"), ids=lambda case: case.instruction)
def test_instructions_become_the_original_prompts_and_ids(case: golden.PromptCase) -> None:
    template = PromptTemplate(case.template)
    assert template.fill(case.instruction) == case.prompt
    assert golden_encoder(template).encode(case.instruction) == case.model_ids


@pytest.mark.parametrize("case", prompt_cases("raw"), ids=lambda case: repr(case.prompt))
def test_raw_texts_become_the_original_ids(case: golden.PromptCase) -> None:
    assert golden_encoder().encode_text(case.prompt) == case.model_ids


def test_the_blank_is_llamas_and_is_appended_only_once() -> None:
    encoder = golden_encoder()
    assert encoder.encode("put spoon on towel")[-1] == 29871
    twice = encoder.encode_text("Out: ")
    assert twice[-1] == 29871
    assert twice[-2] != 29871


def test_golden_cases_have_the_original_prompt_ids() -> None:
    encoder = golden_encoder()
    for case in golden.cases():
        assert encoder.encode(case.instruction) == case.prompt_ids


def test_braces_in_an_instruction_are_only_braces() -> None:
    prompt = PromptTemplate.OPENVLA.fill("stack {instruction} {0}")
    assert prompt == "In: What action should the robot take to stack {instruction} {0}?\nOut:"


@pytest.mark.parametrize("content", [None, "{", '{"model": {"type": "Unigram"}}', '{"model": 3}'])
def test_a_missing_or_foreign_tokenizer_names_the_file_and_the_fix(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        load_encoder(tmp_path, PromptTemplate.OPENVLA, LLAMA_VOCABULARY)
    message = str(caught.value)
    assert str(tmp_path / "tokenizer.json") in message
    assert "\n" not in message


def test_missing_tokenizer_files_are_to_be_copied(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_encoder(tmp_path, PromptTemplate.OPENVLA, LLAMA_VOCABULARY)


def test_a_damaged_bpe_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    damaged = json.loads((golden.TINY_OPENVLA / "tokenizer.json").read_text())
    del damaged["model"]["merges"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(damaged))
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_encoder(tmp_path, PromptTemplate.OPENVLA, LLAMA_VOCABULARY)


def test_a_tokenizer_larger_than_the_decoder_is_refused(tmp_path: Path) -> None:
    shutil.copy(golden.TINY_OPENVLA / "tokenizer.json", tmp_path)
    with pytest.raises(CheckpointError, match="32000 .* 1024"):
        load_encoder(tmp_path, PromptTemplate.OPENVLA, 1024)


def test_a_tokenizer_without_the_blank_is_not_llamas(tmp_path: Path) -> None:
    foreign = json.loads((golden.TINY_OPENVLA / "tokenizer.json").read_text())
    foreign["model"].update(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, merges=[])
    foreign["added_tokens"] = foreign["added_tokens"][:3]
    (tmp_path / "tokenizer.json").write_text(json.dumps(foreign))
    with pytest.raises(CheckpointError, match="no piece '▁'"):
        load_encoder(tmp_path, PromptTemplate.OPENVLA, LLAMA_VOCABULARY)


def test_an_own_tokenizer_is_read_back_and_loses_no_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(INSTRUCTIONS)
    write_tokenizer(tokenizer, tmp_path)
    encoder = load_encoder(tmp_path, PromptTemplate.OPENVLA, 512)
    for instruction in (*INSTRUCTIONS, "把杯子放到桌上", "grab the 🍎\tnow"):
        ids = encoder.encode(instruction)
        text = tokenizer.decode(list(ids[:-1]), skip_special_tokens=True)
        assert text == PromptTemplate.OPENVLA.fill(instruction)
        assert max(ids) < tokenizer.get_vocab_size() <= 300


def test_an_own_tokenizer_splits_a_word_alike_wherever_it_stands() -> None:
    """Pieces must not swallow what follows the instruction, or its last word would be special."""
    tokenizer = build_tokenizer(INSTRUCTIONS)
    at_the_end = tokenizer.encode("put the bowl on the stove?\nOut:").tokens
    in_the_middle = tokenizer.encode("put the bowl on the stove now?\nOut:").tokens
    end = at_the_end.index("▁stove") + 1
    assert at_the_end[:end] == in_the_middle[:end]


def test_other_libraries_read_an_own_tokenizer_alike(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(build_tokenizer(INSTRUCTIONS), tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    encoder = load_encoder(tmp_path, PromptTemplate.OPENVLA, 512)
    for instruction in INSTRUCTIONS:
        prompt = PromptTemplate.OPENVLA.fill(instruction)
        assert tuple(theirs(prompt)["input_ids"]) == encoder.encode(instruction)[:-1]


def test_what_all_prompts_share_is_one_piece_at_either_end() -> None:
    """Else a small model spends most of its prefill on what never changes."""
    tokenizer = build_tokenizer(["take the red mug to me"])
    encoded = tokenizer.encode(PromptTemplate.OPENVLA.fill("take the red mug to me"))
    start, *words, end = encoded.ids[1:]
    assert start == tokenizer.token_to_id("In: What action should the robot take to")
    assert end == tokenizer.token_to_id("?\nOut:")
    assert encoded.tokens[2:-1] == ["▁take", "▁the", "▁red", "▁mug", "▁to", "▁me"]
    assert len(words) == 6
