"""Traps of pi0-FAST's checkpoints that cost users their success without a word, and their costs."""

import math
from collections.abc import Sequence

import torch

from deft_policies.base import Finding, Verdict
from deft_policies.families.pi0fast.files import Pi0FastFiles
from deft_policies.families.pi0fast.network import TABLE, Pi0FastConfig
from deft_policies.families.pi0fast.words import END, Words
from deft_policies.model.tensor_names import TensorPlace

_OLD_FAST = "physical-intelligence/fast"  # LeRobot 0.4's default
_GEMMA_ROWS, _GEMMA_END = 257_152, 235_371
_USUAL_ROWS = 60  # of a prompt


def find_traps(
    files: Pi0FastFiles, words: Words, config: Pi0FastConfig, num_codes: int, pads_state: bool
) -> list[Finding]:
    """What `deft doctor` says of the files, besides that they fit together."""
    return [
        _of_statistics(files),
        _of_prompt(files, config, pads_state),
        _of_answers(files, words, config, num_codes),
        Finding(
            "positions",
            Verdict.GOOD,
            "LeRobot's: a second <bos> ends the prompt, and the answer goes on behind it without a "
            "gap. openpi has no second <bos>, shows a black picture for a missing camera, and its "
            "server places the answer one further: weights that were "
            "converted from openpi's are another policy here",
        ),
    ]


def _of_statistics(files: Pi0FastFiles) -> Finding:
    state, action = files.state.mode.value, files.action.mode.value
    text = (
        f"by the pipelines: state {state}, actions {action}"
        f"{', relative to the state' if files.is_relative else ''}"
    )
    doubts = []
    if files.declared and files.declared != (state, action):
        doubts.append(f"config.json says state {files.declared[0]}, actions {files.declared[1]}")
    if state != action:
        doubts.append("the two differ, which no published policy does")
    if not doubts:
        return Finding("normalisation", Verdict.GOOD, text)
    text = f"{text}; {'; '.join(doubts)}. With statistics of the other kind a policy never succeeds"
    return Finding("normalisation", Verdict.DOUBTFUL, text)


def _of_prompt(files: Pi0FastFiles, config: Pi0FastConfig, pads_state: bool) -> Finding:
    """No file says which version of LeRobot has trained a policy."""
    signs = []
    if config.is_tied and TABLE not in config.stored:
        signs.append("head and embedding are saved as lm_head alone")
    if files.fast_tokenizer == _OLD_FAST:
        signs.append(f"its FAST tokenizer is {_OLD_FAST}")
    num = files.padded_state if pads_state else files.state.dim
    text = f"the state is written as {num} numbers"
    if not signs or pads_state:
        return Finding("prompt", Verdict.GOOD, text)
    text += (
        f"; but {' and '.join(signs)}, as LeRobot 0.4 did, whose prompts had {files.padded_state} "
        "numbers: if it fails, try --padded-state"
    )
    return Finding("prompt", Verdict.DOUBTFUL, text)


def _of_answers(
    files: Pi0FastFiles, words: Words, config: Pi0FastConfig, num_codes: int
) -> Finding:
    ids, num = words.code_ids(num_codes, files.num_skipped), files.horizon * files.action_dim
    text = (
        f"{files.horizon} x {files.action_dim} = {num} coefficients in {num_codes} codes, ids "
        f"{ids[-1]} to {ids[0]}; {END!r} is {words.end}"
    )
    doubts = []
    if config.num_rows == _GEMMA_ROWS and words.end != _GEMMA_END:
        doubts.append(f"PaliGemma's {END!r} is {_GEMMA_END}, so no answer would end")
    spaced = words.tokenizer.encode(f" {END}", add_special_tokens=False).ids
    if spaced == [words.end]:
        doubts.append(f"{END!r} behind a space is the same token, which in PaliGemma's is another")
    if files.num_executed < files.horizon:
        text += (
            f"; all {files.horizon} actions are decoded, robots are to execute "
            f"{files.num_executed} (LeRobot cuts the frequencies instead, and moves otherwise)"
        )
    if doubts:
        return Finding("answers", Verdict.DOUBTFUL, f"{text}; but {'; '.join(doubts)}")
    return Finding("answers", Verdict.GOOD, text)


def find_costs(
    config: Pi0FastConfig, places: Sequence[TensorPlace], num_cameras: int, dtype: torch.dtype
) -> Finding:
    """What a token reads and a prompt computes, by the sizes alone."""
    sizes = {place.name: math.prod(place.shape) for place in places}
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    tower = sum(size for name, size in sizes.items() if name.startswith("tower."))
    llm = config.llm
    head = llm.vocabulary * llm.width
    cached = 2 * llm.num_layers * llm.num_kv_heads * llm.head_dim * dtype.itemsize
    rows = num_cameras * config.tower.num_patches + _USUAL_ROWS
    text = (
        f"{sum(sizes.values()) / 1e9:.3f} billion weights; a token reads "
        f"{layers * dtype.itemsize / 1e9:.2f} GB of layers and {head * dtype.itemsize / 1e9:.2f} "
        f"GB of the head ({llm.vocabulary} of {config.num_rows} rows) and keeps "
        f"{cached / 1e3:.1f} kB; a prompt of {rows} rows computes {2 * rows * layers / 1e12:.1f} "
        f"TFLOP, {num_cameras} picture(s) "
        f"{2 * num_cameras * config.tower.num_patches * tower / 1e12:.1f}"
    )
    return Finding("arithmetic", Verdict.GOOD, text)
