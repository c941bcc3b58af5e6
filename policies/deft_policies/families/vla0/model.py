"""VLA-0: pictures and an instruction to a chunk of actions, written as numbers.

An answer is an action only where it is exactly what was asked for. What the original makes of
others, the middle of the range or a repeated row, would move a robot without a word. Its tokens are
known to the decoder by their places among twelve; outside they have the tokenizer's ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from deft_core.peers.conventions import Gripper
from deft_core.types import Observation
from deft_policies.decoding.acceptance.numbers import END, SPACE
from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.target import Prompt, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import CheckpointError, NoActionError
from deft_policies.families.action_tokens import POSE
from deft_policies.families.model import Model, TokenModel
from deft_policies.families.vla0.network import CHARACTERS, Vla0Network
from deft_policies.families.vla0.pictures import make_pictures, to_patches
from deft_policies.families.vla0.prompt import IMAGE_PAD, encode_prompt, mrope_positions
from deft_policies.families.vla0.run_folder import RunFolder
from deft_policies.model.graphs import StepRunner, Tensors
from deft_policies.model.llama import MRopeTable
from deft_policies.model.sizes import TokenRange
from deft_policies.model.staging import to_device

WIDEST = 128  # nodes of a draft tree


@dataclass(frozen=True)
class RepetitionPenalty:
    """Logits are smaller where a token came before: in the prompt, the answer or on the path."""

    penalty: float
    seen: frozenset[int]  # tokens that the prompt holds

    def adjust(self, logits: Tensor, answer: Answer, tree: DraftTree) -> Tensor:
        """Divide what is above 0 and multiply what is below, once for each token that came."""
        common = self.seen | {*answer.tokens[: answer.num_cached], tree.tokens[0]}
        if not answer.records:  # the last token of the prompt is none of the decoder's
            common = self.seen
        paths: list[frozenset[int]] = [frozenset()]  # of a node: tokens not in `common`
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            paths.append(paths[parent] | ({token} - common))
        adjusted, columns = logits.clone(), to_device(sorted(common), logits.device, torch.int64)
        adjusted.index_copy_(1, columns, self._smaller(logits.index_select(1, columns)))
        pairs = [(node, token) for node, path in enumerate(paths) for token in path]
        if pairs:
            nodes, tokens = to_device(pairs, logits.device, torch.int64).unbind(1)
            adjusted[nodes, tokens] = self._smaller(logits[nodes, tokens])
        return adjusted

    def _smaller(self, logits: Tensor) -> Tensor:
        return torch.where(logits > 0, logits / self.penalty, logits * self.penalty)

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """None are."""
        return ()


_NUMBERS = re.compile(r"[0-9]+( [0-9]+)*")


class Vla0(TokenModel):
    """Looks at the frame and at wrist cameras; the robot's state is ignored."""

    family = "vla0"
    widest = WIDEST
    network: Vla0Network

    def __init__(
        self,
        network: Vla0Network,
        run: RunFolder,
        tokenizer: Tokenizer,
        runner: StepRunner,
        max_tokens: int,
    ) -> None:
        self.run, self._max_tokens, config = run, max_tokens, network.config
        encode = partial(encode_prompt, tokenizer, run)
        # Pictures come before the instruction, so at the same positions of every prompt.
        ids, pad = encode(""), tokenizer.token_to_id(IMAGE_PAD)
        assert pad is not None  # the prompt holds it
        self._slots = [slot for slot, token in enumerate(ids) if token == pad]
        self._characters = dict(zip(config.answer_ids, (*CHARACTERS, ""), strict=True))
        positions = mrope_positions(ids, pad, run.grid)
        network.decoder.rotary = MRopeTable(config.llm, positions, config.mrope_section)
        self.target = Target(network.decoder, TokenRange(0, END), runner=runner)
        super().__init__(network, encode, None, config.statistics, runner)
        self._slots_here = torch.tensor(self._slots, device=self.device)
        self.num_steps = run.num_steps
        self.num_pictures = run.num_cameras
        self.longest_prompt = config.llm.max_positions - max_tokens - WIDEST - 1
        if runner.reserve is not None:
            self.longest_prompt = min(self.longest_prompt, runner.reserve.lengths[-1])
        self.details = {
            "cameras": f"image and {run.num_cameras - 1} whose names contain 'wrist'",
            "pictures": "tiled" if run.is_tiled else "one of each camera",
            "prompt": "Picture 1: " if run.names_pictures else "pictures have no names",
            "repetition penalty": f"{run.repetition_penalty:g}",
            "longest answer": f"{max_tokens} tokens",
            "gripper": Gripper.ROBOSUITE.meaning,
        }

    def spec(self, key: str) -> AnswerSpec:
        """Rows of numbers and an end."""
        run = self.run
        units = (run.highest - run.lowest) / run.num_bins
        groups = POSE if run.action_dim == len(POSE) else (DimensionGroup.MOVE,) * run.action_dim
        no_classes = (None,) * run.action_dim
        space = ActionSpace(groups, tuple(units.tolist()), no_classes, run.num_bins)
        return AnswerSpec(self._max_tokens, END, space, self.network.config.answer_ids)

    def decode(self, key: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """The actions of a valid answer, [step, action_dim]."""
        text, _ = self.read_text(tokens)
        has_ended = bool(tokens) and tokens[-1] == self.network.config.answer_ids[END]
        return to_actions(read_numbers_text(text, has_ended, self.run), self.run)

    def decode_begun(self, key: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """The rows behind whose last number the text goes on."""
        text, _ = self.read_text(tokens)
        return to_actions(read_rows_begun(text, self.run), self.run)

    def read_text(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The numbers; they have no parts."""
        return "".join(self._characters[token] for token in tokens), ()

    def see(self, observations: Sequence[Observation], clock: StageClock) -> list[Prompt]:
        """Pictures and prompts, embedded. Shorter prompts are padded on the right."""
        pictures = np.stack(
            [make_pictures(self.pictures(observation), self.run) for observation in observations]
        )
        texts = [self.encode(observation.instruction) for observation in observations]
        clock.record(Stage.PREPARE)
        step = (to_device(pictures, self.device),)
        (tokens,) = self.runner.run_batch((self, "see"), self._see_step, step)
        longest = max(map(len, texts))
        padded = [[*ids, *[ids[-1]] * (longest - len(ids))] for ids in texts]
        embeds = self.network.embed_tokens(to_device(padded, self.device))
        embeds.index_copy_(1, self._slots_here, tokens)
        clock.record(Stage.VISION)
        span = slice(self._slots[0], self._slots[-1] + 1)
        return [
            Prompt(
                embeds[row, : len(ids)],
                # The decoder knows no word that a prompt ends in; every prompt holds a space.
                SPACE,
                span,
                grammar=self._penalty_of(ids),
            )
            for row, ids in enumerate(texts)
        ]

    def _penalty_of(self, ids: Sequence[int]) -> RepetitionPenalty | None:
        """What a prompt's own numbers do to an answer; None where nothing is penalised."""
        if self.run.repetition_penalty == 1.0:
            return None
        answer_ids = self.network.config.answer_ids
        prompt_tokens = set(ids)
        seen = frozenset(
            number for number, token in enumerate(answer_ids) if token in prompt_tokens
        )
        return RepetitionPenalty(self.run.repetition_penalty, seen)

    @torch.no_grad()
    def _see_step(self, pictures: Tensor) -> Tensors:
        """Tokens [frame, token, width] of bytes [frame, picture, row, column, channel]."""
        patches = to_patches(pictures.flatten(0, 1)).to(self.network.embed_tokens.weight.dtype)
        tokens = self.network.vision(patches, self.run.grid)
        return (tokens.reshape(len(pictures), -1, tokens.shape[2]),)

    def capture(self) -> None:
        """Record the tower, for every batch within the reserve."""
        frame = np.zeros((self.run.size, self.run.size, 3), np.uint8)
        black = np.stack(make_pictures([frame] * self.run.num_cameras, self.run))
        for rows in () if self.runner.reserve is None else self.runner.reserve.batches:
            pictures = to_device(np.stack([black] * rows), self.device)
            self.runner.run_batch((self, "see"), self._see_step, (pictures,))

    def draft_with(self, draft: Model) -> None:
        """Refused: no other model is known that writes such numbers."""
        raise CheckpointError("--draft-model: vla0 drafts from its last answer; leave it out")


def read_numbers_text(text: str, has_ended: bool, run: RunFolder) -> list[int]:
    """The numbers of a valid answer; `NoActionError` says what is wrong with another."""
    if not has_ended:
        raise NoActionError("the text did not end within the tokens that it may have")
    if not _NUMBERS.fullmatch(text):
        raise NoActionError("the text is not numbers with single spaces between them")
    words = text.split(" ")
    if len(words) != run.num_numbers:
        raise NoActionError(f"the text has {len(words)} numbers, {run.num_numbers} are needed")
    longest = len(str(run.num_bins))
    numbers = [int(word) if len(word) <= longest else run.num_bins + 1 for word in words]
    if max(numbers) > run.num_bins:
        raise NoActionError(f"a number of the text is above {run.num_bins}")
    return numbers


def read_rows_begun(text: str, run: RunFolder) -> list[int]:
    """Numbers of the whole rows with which a text begins, as far as they are in range."""
    numbers: list[int] = []
    for word in text.split(" ")[: run.num_numbers][:-1]:
        if not word or len(word) > len(str(run.num_bins)) or int(word) > run.num_bins:
            break
        numbers.append(int(word))
    return numbers[: len(numbers) // run.action_dim * run.action_dim]


def to_actions(numbers: list[int], run: RunFolder) -> NDArray[np.float64]:
    """Actions [step, action_dim] in robot units.

    A share of the range is rounded to float32 first; the rest is in the format of the statistics.
    """
    shares = np.array(numbers, np.float32).reshape(-1, run.action_dim) / np.float32(run.num_bins)
    return np.asarray(shares * (run.highest - run.lowest) + run.lowest, np.float64)
