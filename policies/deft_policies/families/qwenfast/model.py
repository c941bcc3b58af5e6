"""QwenFAST and NORA: pictures and an instruction to a chunk of actions, written as FAST codes.

An answer is an action only where its codes are exactly one chunk and it has ended. With the grammar
nothing else can be written; without it all else is no action. The projects themselves make zeros of
it, the middle of the range, or a giant action of a broken character.
"""

import re
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_core.types import Image, Observation
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.target import Grammar, Prompt, Target
from deft_policies.errors import CheckpointError, NoActionError, RequestError
from deft_policies.families.model import Model, TokenModel
from deft_policies.families.qwenfast.network import SIDE, QwenFastNetwork
from deft_policies.families.qwenfast.policy_files import INSTRUCTION, PolicyFiles
from deft_policies.families.vla0.model import RepetitionPenalty
from deft_policies.families.vla0.pictures import to_patches
from deft_policies.families.vla0.prompt import IMAGE_PAD, mrope_positions
from deft_policies.fast.answer import AnswerGrammar, TokenGrammar
from deft_policies.fast.grammar import ChunkGrammar, strides_of
from deft_policies.model.graphs import StepRunner
from deft_policies.model.llama import MRopeTable
from deft_policies.model.qwen_vision import MERGE, PATCH
from deft_policies.model.sizes import TokenRange
from deft_policies.model.staging import to_device

WIDEST = 64  # nodes of a draft tree: more than most answers have
_GRID = (SIDE // PATCH, SIDE // PATCH)  # patches of a picture
_PICTURE = f"<|vision_start|>{IMAGE_PAD}<|vision_end|>"
_ACTION_TOKEN = re.compile(r"<robot_action_\d+>")


class QwenFast(TokenModel):
    """Looks at the frame, and at the wrist where its data had two cameras; reads no state."""

    widest = WIDEST
    may_exceed = True  # nothing is clipped, as published
    network: QwenFastNetwork

    def __init__(
        self,
        family: str,
        network: QwenFastNetwork,
        files: PolicyFiles,
        runner: StepRunner,
        max_tokens: int,
        has_grammar: bool,
    ) -> None:
        self.family, self.files, self._max_tokens = family, files, max_tokens
        config, ids, self._stops = network.config, files.code_ids(), files.stop_ids()
        self._codes = {token: code for code, token in enumerate(ids)}
        self._strides = dict(zip(ids, strides_of(files.codec.pieces), strict=True))
        # Pictures come before the instruction, so at the same positions of every prompt.
        prompt, pad = encode_prompt(files, ""), files.tokenizer.token_to_id(IMAGE_PAD)
        self._slots = [slot for slot, token in enumerate(prompt) if token == pad]
        assert pad is not None  # the prompt holds it
        positions = mrope_positions(prompt, pad, _GRID)
        network.decoder.rotary = MRopeTable(config.llm, positions, config.mrope_section)
        self.target = Target(network.decoder, TokenRange(min(ids), max(ids)), runner=runner)
        encode = partial(encode_prompt, files)
        super().__init__(network, encode, None, files.statistics, runner)
        self._grammar: TokenGrammar | None = None
        if has_grammar:
            chunk = ChunkGrammar(files.codec.pieces, files.num_coefficients)
            columns = to_device(ids, self.device, torch.int64)
            self._grammar = TokenGrammar(chunk, columns, self._stops[0])
            self.cuts_answers = False
        self.num_steps = files.num_steps
        self.num_pictures = files.num_cameras
        self.longest_prompt = config.llm.max_positions - max_tokens - WIDEST - 1
        if runner.reserve is not None:
            self.longest_prompt = min(self.longest_prompt, runner.reserve.lengths[-1])
        penalty = files.settings.repetition_penalty
        self.details = {
            "cameras": f"image and {files.num_cameras - 1} whose names contain 'wrist'",
            "pictures": f"{SIDE}x{SIDE}, {files.resample.name.lower()}",
            "prompt": files.template,
            "action tokens": f"{files.fast}: {len(ids)} codes, scale {files.codec.scale:g}",
            "grammar": "on" if has_grammar else "off",
            "repetition penalty": f"{penalty:g}",
            "longest answer": f"{max_tokens} tokens",
            "gripper": files.gripper,
        }

    def spec(self, key: str) -> AnswerSpec:
        """Codes and an end."""
        first, *other_stops = self._stops
        return AnswerSpec(
            self._max_tokens, first, other_stops=tuple(other_stops), strides=self._strides
        )

    def decode(self, key: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """The actions of a valid answer, [step, action_dim]."""
        files = self.files
        if not tokens or tokens[-1] not in self._stops:
            raise NoActionError(f"the answer did not end within {len(tokens)} tokens")
        codes_or_none = [self._codes.get(token) for token in tokens[:-1]]
        codes = [code for code in codes_or_none if code is not None]
        if len(codes) < len(codes_or_none):
            raise NoActionError(
                f"{len(codes_or_none) - len(codes)} of the answer's {len(codes_or_none)} tokens "
                "are no action tokens"
            )
        actions = files.codec.decode(codes, files.num_steps, files.action_dim)
        return files.unnormalise(actions, self.statistics[key])

    def coefficients(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Those that begin in each token of a valid answer."""
        return self.files.codec.begun([self._codes.get(one) for one in tokens])

    def read_text(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The tokens' names, all of them but the end's; they have no parts."""
        ended = len(tokens) - (tokens[-1:] != [] and tokens[-1] in self._stops)
        text: str = self.files.tokenizer.decode(tokens[:ended], skip_special_tokens=False)
        return text, ()

    def see(self, observations: Sequence[Observation], clock: StageClock) -> list[Prompt]:
        """Pictures and prompts, embedded."""
        pictures = np.stack(
            [
                picture
                for observation in observations
                for picture in make_pictures(self.pictures(observation), self.files)
            ]
        )
        texts = [self.encode(observation.instruction) for observation in observations]
        clock.record(Stage.PREPARE)
        weight = self.network.decoder.embedding.weight
        patches = to_patches(to_device(pictures, weight.device)).to(weight.dtype)
        tokens = self.network.vision(patches, _GRID)
        tokens = tokens.reshape(len(texts), -1, tokens.shape[2])
        prompts = []
        for ids, seen in zip(texts, tokens, strict=True):
            embeds = self.target.embed(to_device(ids, self.device))
            embeds[self._slots] = seen
            span = slice(self._slots[0], self._slots[-1] + 1)
            prompts.append(Prompt(embeds, ids[-1], span, grammar=self._grammar_of(ids)))
        clock.record(Stage.VISION)
        return prompts

    def _grammar_of(self, ids: Sequence[int]) -> Grammar | None:
        """The penalty of the prompt's tokens, and the grammar of the answer."""
        penalty = self.files.settings.repetition_penalty
        penalised = None if penalty == 1.0 else RepetitionPenalty(penalty, frozenset(ids))
        return penalised if self._grammar is None else AnswerGrammar(self._grammar, penalised)

    def capture(self) -> None:
        """Nothing is captured of what looks at pictures."""

    def draft_with(self, draft: Model) -> None:
        """Refused: no other model is known that writes such codes."""
        raise CheckpointError(
            f"--draft-model: {self.family} drafts from its last answer; leave it out"
        )


def make_pictures(images: Sequence[Image], files: PolicyFiles) -> list[NDArray[np.uint8]]:
    """What the processor is given: every picture by itself, brought to size whatever its ratio."""
    return [
        np.array(PillowImage.fromarray(image).resize((SIDE, SIDE), files.resample))
        for image in images
    ]


def prompt_text(files: PolicyFiles, instruction: str) -> str:
    """The instruction is used as it is: nothing is stripped or lower-cased."""
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"{_PICTURE * files.num_cameras}{files.template.replace(INSTRUCTION, instruction)}"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def encode_prompt(files: PolicyFiles, instruction: str) -> list[int]:
    """Ids of the whole prompt; an instruction can write neither pictures nor actions."""
    written = _ACTION_TOKEN.search(instruction)
    if IMAGE_PAD in instruction or written:
        raise RequestError(
            "instruction",
            f"holds {IMAGE_PAD}, which marks a picture"
            if written is None
            else f"holds {written[0]}, which is a part of an action",
        )
    rows, columns = _GRID
    pads = IMAGE_PAD * (rows * columns // MERGE**2)
    text = prompt_text(files, instruction).replace(IMAGE_PAD, pads)
    ids: list[int] = files.tokenizer.encode(text, add_special_tokens=False).ids
    return ids
