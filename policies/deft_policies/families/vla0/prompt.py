"""The prompt, word for word, and the positions of its tokens."""

from collections.abc import Sequence
from itertools import groupby

import torch
from tokenizers import Tokenizer
from torch import Tensor

from deft_policies.errors import RequestError
from deft_policies.families.vla0.run_folder import RunFolder
from deft_policies.model.qwen_vision import MERGE

IMAGE_PAD = "<|image_pad|>"
END = "<|im_end|>"
_PICTURE = f"<|vision_start|>{IMAGE_PAD}<|vision_end|>"
_SYSTEM = (
    "Analyze the input image and predict robot actions for the next {steps} timesteps. Each action "
    "has {dim} dimensions. Output a single sequence of {numbers} integers (0-{bins} each), "
    "representing the {steps} timesteps sequentially. Provide only space separated numbers. "
    "Nothing else."
)


def prompt_text(run: RunFolder, instruction: str) -> str:
    """The instruction is used as it is: nothing is stripped or lower-cased."""
    system = _SYSTEM.format(
        steps=run.num_steps, dim=run.action_dim, numbers=run.num_numbers, bins=run.num_bins
    )
    pictures = [
        f"Picture {number + 1}: {_PICTURE}" if run.names_pictures else _PICTURE
        for number in range(run.num_pictures)
    ]
    return (
        f"<|im_start|>system\n{system}{END}\n<|im_start|>user\n{''.join(pictures)}"
        f"{instruction}{END}\n<|im_start|>assistant\n"
    )


def encode_prompt(tokenizer: Tokenizer, run: RunFolder, instruction: str) -> list[int]:
    """Ids of the whole prompt; an instruction cannot write a picture."""
    if IMAGE_PAD in instruction:
        raise RequestError("instruction", f"holds {IMAGE_PAD}, which marks a picture")
    rows, columns = run.grid
    pads = IMAGE_PAD * (rows * columns // MERGE**2)
    text = prompt_text(run, instruction).replace(IMAGE_PAD, pads)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def mrope_positions(ids: Sequence[int], pad: int, grid: tuple[int, int]) -> Tensor:
    """Time, row and column of every token [3, token].

    Text counts up in all three. The tokens of a picture have their row and column as positions,
    counted from its beginning, and the text after it goes on behind the longer side.
    """
    sides = [side // MERGE for side in grid]
    picture = torch.cartesian_prod(torch.arange(1), *map(torch.arange, sides)).T
    parts: list[Tensor] = []
    begin = 0
    for is_picture, run_of_ids in groupby(ids, pad.__eq__):
        length = len(list(run_of_ids))
        parts.append(begin + (picture if is_picture else torch.arange(length).expand(3, -1)))
        begin += max(sides) if is_picture else length
    return torch.cat(parts, dim=1)
