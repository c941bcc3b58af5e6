"""The prompt, word for word, and where its tokens stand."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deft_policies.families.vla0.pictures import MERGE
from deft_policies.families.vla0.run_folder import RunFolder

IMAGE_PAD = "<|image_pad|>"
END = "<|im_end|>"
_PICTURE = f"<|vision_start|>{IMAGE_PAD}<|vision_end|>"
_SYSTEM = (
    "Analyze the input image and predict robot actions for the next {steps} timesteps. Each action "
    "has {dim} dimensions. Output a single sequence of {numbers} integers (0-{bins} each), "
    "representing the {steps} timesteps sequentially. Provide only space separated numbers. "
    "Nothing else."
)


def prompt_text(run: RunFolder, instruction: str, num_pictures: int) -> str:
    """The instruction is used as it is: nothing is stripped or lower-cased."""
    system = _SYSTEM.format(
        steps=run.num_steps, dim=run.action_dim, numbers=run.num_numbers, bins=run.num_bins
    )
    pictures = [
        f"Picture {number + 1}: {_PICTURE}" if run.names_pictures else _PICTURE
        for number in range(num_pictures)
    ]
    return (
        f"<|im_start|>system\n{system}{END}\n<|im_start|>user\n{''.join(pictures)}"
        f"{instruction}{END}\n<|im_start|>assistant\n"
    )


def encode_prompt(tokenizer: Tokenizer, text: str, grids: Sequence[tuple[int, int]]) -> list[int]:
    """Ids of a prompt; a picture has as many as it has merged places."""
    pad = tokenizer.token_to_id(IMAGE_PAD)
    left = iter(grids)
    ids: list[int] = []
    for one in tokenizer.encode(text, add_special_tokens=False).ids:
        if one == pad:
            rows, columns = next(left)
            ids += [pad] * (rows * columns // MERGE**2)
        else:
            ids.append(one)
    return ids


def prompt_positions(ids: Sequence[int], pad: int, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Time, row and column of every token [3, token].

    Text counts up in all three. The places of a picture stand at their row and column behind its
    beginning, and the text after it goes on behind the longer side.
    """
    columns: list[tuple[int, int, int]] = []
    left = iter(grids)
    next_position, index = 0, 0
    while index < len(ids):
        if ids[index] != pad:
            columns.append((next_position,) * 3)
            next_position, index = next_position + 1, index + 1
            continue
        rows, width = (side // MERGE for side in next(left))
        begin = next_position
        columns += [
            (begin, begin + row, begin + one) for row in range(rows) for one in range(width)
        ]
        next_position, index = begin + max(rows, width), index + rows * width
    return torch.tensor(columns).T
