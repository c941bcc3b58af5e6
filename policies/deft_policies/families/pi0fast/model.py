"""pi0-FAST: pictures, the robot's state and an instruction to a chunk of actions, as FAST codes.

The pictures come first, 256 rows each, then the prompt and a second `<bos>`: all of these see each
other, and nothing that is written behind them. Cameras that a robot has not are left out, as what
is masked counts for no position.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deft_core.peers.conventions import ARM_DIMENSIONS, Gripper
from deft_core.types import Image, Observation
from deft_policies.base import ActionLimits
from deft_policies.decoding.clock import Stage, StageClock
from deft_policies.decoding.sampling import first_maximum
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.target import Prompt, Target
from deft_policies.errors import CheckpointError, NoActionError, RequestError
from deft_policies.families.model import WRIST, Model, TokenModel
from deft_policies.families.pi0fast.files import IMAGES, Pi0FastFiles
from deft_policies.families.pi0fast.grammar import Pi0FastGrammar, WatchedTarget
from deft_policies.families.pi0fast.network import PaliGemma
from deft_policies.families.pi0fast.pictures import SIDE, to_pixels
from deft_policies.families.pi0fast.prompt import PromptEncoder, prompt_text, state_bins
from deft_policies.families.pi0fast.words import Words
from deft_policies.fast.answer import TokenGrammar
from deft_policies.fast.codec import FastCodec
from deft_policies.fast.grammar import ChunkGrammar, strides_of
from deft_policies.model.graphs import StepRunner, Tensors
from deft_policies.model.sizes import TokenRange
from deft_policies.model.staging import to_device

WIDEST = 64  # nodes of a draft tree: more than most answers have


class Pi0Fast(TokenModel):
    """Looks at one or more cameras, and at the robot's state."""

    family = "pi0fast"
    widest = WIDEST
    may_exceed = True  # nothing is clipped, as published
    network: PaliGemma

    def __init__(
        self,
        network: PaliGemma,
        files: Pi0FastFiles,
        words: Words,
        codec: FastCodec,
        runner: StepRunner,
        max_tokens: int,
        pads_state: bool,
    ) -> None:
        """With a grammar the decoder has the rows of answers alone, and names them by `ids`."""
        config, self.files, self._words, self._codec = network.config, files, words, codec
        self._max_tokens, self._pads = max_tokens, files.padded_state if pads_state else 0
        self._encoder = PromptEncoder(words.tokenizer, config.num_rows, files.max_prompt)
        ids = words.code_ids(len(codec.pieces), files.num_skipped)
        self._codes = {token: code for code, token in enumerate(ids)}
        self._grammar: TokenGrammar | None = None
        self._names: tuple[int, ...] = ()
        tokens, self._stop = ids, words.end
        if config.answer_ids:
            answer_ids = frozenset(config.answer_ids)
            rest = (row for row in range(config.num_rows) if row not in answer_ids)
            # Behind the decoder's tokens, what only the whole head can say.
            self._names = (*config.answer_ids, *rest)
            columns = {token: column for column, token in enumerate(self._names)}
            tokens, self._stop = [columns[token] for token in ids], columns[words.end]
            codes = TokenRange(min(tokens), max(tokens))
            self.target: Target = WatchedTarget(network.decoder, codes, runner=runner)
            self._prefix = tuple(columns[token] for token in words.prefix)
            by_code = to_device(tokens, self.device_of(network), torch.int64)
            chunk = ChunkGrammar(codec.pieces, files.horizon * files.action_dim)
            self._grammar = TokenGrammar(chunk, by_code, self._stop)
            self._columns = columns
            self.cuts_answers = False
        else:
            codes = TokenRange(min(tokens), max(tokens))
            self.target = Target(network.decoder, codes, runner=runner)
        self._strides = dict(zip(tokens, strides_of(codec.pieces), strict=True))
        super().__init__(network, self._encode, None, config.statistics, runner)
        self.num_steps = files.horizon
        self.num_pictures = len(files.robot_cameras)
        self.state_dim = files.state.dim
        self.longest_prompt = files.max_prompt + 1
        self.details = {
            "cameras": ", ".join(files.robot_cameras) + "; those that a frame lacks are left out",
            "state": f"{files.state.dim}, raw, normalised by {files.state.mode.value}"
            + (f", padded to {self._pads}" if self._pads else ""),
            "actions": f"normalised by {files.action.mode.value}"
            + (", relative to the state" if files.is_relative else ""),
            "prompt": f"cut behind {files.max_prompt} tokens, the state first",
            "action tokens": f"{files.fast_tokenizer}: {len(codec.pieces)} codes",
            "grammar": "off" if self._grammar is None else "on",
            "longest answer": f"{max_tokens} tokens",
        }
        if files.action_dim == ARM_DIMENSIONS:
            self.details["gripper"] = Gripper.ROBOSUITE.meaning

    @staticmethod
    def device_of(network: PaliGemma) -> torch.device:
        """Where the weights are."""
        return network.decoder.embedding.weight.device

    def spec(self, key: str) -> AnswerSpec:
        """`Action: `, codes and an end."""
        return AnswerSpec(self._max_tokens, self._stop, ids=self._names, strides=self._strides)

    def limits(self, key: str) -> ActionLimits:
        """What the data set's actions lay between, the robot's state added where it is."""
        return self.files.limits

    def decode(self, key: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """The actions of a valid answer [step, action_dim], before the state is added."""
        files, prefix = self.files, list(self._words.prefix)
        if not tokens or tokens[-1] != self._words.end:
            raise NoActionError(f"the answer did not end within {len(tokens)} tokens")
        if list(tokens[: len(prefix)]) != prefix:
            raise NoActionError("the answer does not begin with 'Action: '")
        written = tokens[len(prefix) : -1]
        codes = [code for token in written if (code := self._codes.get(token)) is not None]
        if len(codes) < len(written):
            raise NoActionError(
                f"{len(written) - len(codes)} of the answer's {len(written)} tokens are no FAST "
                "codes"
            )
        normalised = self._codec.decode(codes, files.horizon, files.action_dim)
        return files.action.restore(normalised.astype(np.float32)).astype(np.float64)

    def for_robot(
        self, actions: NDArray[np.float64], observation: Observation
    ) -> NDArray[np.float64]:
        """Absolute actions, in float32 as LeRobot adds the state."""
        if not self.files.is_relative:
            return actions
        assert observation.state is not None  # the frame was checked
        state = observation.state[: self.files.action_dim] * np.array(self.files.adds_state)
        absolute: NDArray[np.float32] = actions.astype(np.float32) + state.astype(np.float32)
        return absolute.astype(np.float64)

    def coefficients(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Those that begin in each token of a valid answer."""
        return self._codec.begun([self._codes.get(one) for one in tokens])

    def read_text(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The tokens' names; they have no parts."""
        text: str = self._words.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text, ()

    def check(self, observation: Observation) -> None:
        """Refuse unknown cameras, another state, and words that the model does not know."""
        self.pictures(observation)
        state, expected = observation.state, self.files.state.dim
        if state is None or len(state) != expected:
            got = "none" if state is None else f"{len(state)} numbers"
            raise RequestError(
                "state", f"the model reads the robot's raw state, {expected} numbers; got {got}"
            )
        self._ids(observation)

    @property
    def camera_names(self) -> list[str]:
        """The robot's cameras by the model's names for them, but for one that is the frame."""
        return [camera for camera in self.files.robot_cameras if camera != "image"]

    def pictures(self, observation: Observation) -> list[Image]:
        """Those of the model's cameras that a frame has, in the order of the prompt.

        A camera goes by the model's name for it, or by one with `wrist` in it: those take the
        places that are left, in their order. The frame itself is the first camera, unless a camera
        of that name is there, or the very same array under another name.
        """
        files, cameras, wrists = self.files, dict[str, Image](), list[Image]()
        for name, image in observation.cameras.items():
            ours = name.removeprefix(IMAGES)
            ours = files.renames.get(ours, ours)
            if ours in files.cameras:
                cameras[ours] = image
            elif WRIST in name:
                wrists.append(image)
            else:
                raise RequestError(
                    "cameras",
                    f"{name!r} is none of the model's cameras: {', '.join(files.robot_cameras)}",
                )
        if not any(picture is observation.image for picture in cameras.values()):
            cameras.setdefault(files.cameras[0], observation.image)
        missing = [camera for camera in files.robot_cameras if camera not in cameras]
        if len(wrists) > len(missing):
            raise RequestError(
                "cameras",
                f"the model looks at {', '.join(files.robot_cameras)}; got "
                f"{1 + len(observation.cameras)} pictures",
            )
        cameras |= dict(zip(missing, wrists, strict=False))
        return [cameras[camera] for camera in files.cameras if camera in cameras]

    def _encode(self, instruction: str) -> list[int]:
        """The prompt of a robot whose state is all zeros: what is said of prompts in general."""
        state = np.zeros(self.files.state.dim, np.float32)
        bins = state_bins(state, self.files.state, self._pads)
        return self._encoder.encode(prompt_text(instruction, bins.tolist()))

    def _ids(self, observation: Observation) -> list[int]:
        assert observation.state is not None
        bins = state_bins(observation.state, self.files.state, self._pads)
        return self._encoder.encode(prompt_text(observation.instruction, bins.tolist()))

    def see(self, observations: Sequence[Observation], clock: StageClock) -> list[Prompt]:
        """Pictures and prompts, embedded. Each frame is looked at by itself."""
        pixels = [
            torch.stack([to_pixels(picture) for picture in self.pictures(seen)])
            for seen in observations
        ]
        texts = [self._ids(observation) for observation in observations]
        clock.record(Stage.PREPARE)
        weight, prompts = self.network.decoder.embedding.weight, []
        for pictures, ids in zip(pixels, texts, strict=True):
            patches = self._look(pictures.to(weight.device, weight.dtype)).flatten(0, 1)
            embeds = torch.cat((patches, self.network.words(to_device(ids, weight.device))))
            span = slice(0, len(patches))
            # The decoder may not know the word that a prompt ends in; its embedding is looked up
            # here.
            last = self._stop if self._names else ids[-1]
            prompts.append(Prompt(embeds, last, span, len(embeds), self._new_grammar()))
        clock.record(Stage.VISION)
        return prompts

    def _new_grammar(self) -> Pi0FastGrammar | None:
        if self._grammar is None:
            return None
        assert isinstance(self.target, WatchedTarget)
        return Pi0FastGrammar(
            self._grammar, prefix=self._prefix, target=self.target, free=self._free_tokens
        )

    def _free_tokens(self, hidden: torch.Tensor) -> list[int]:
        logits = torch.mm(hidden, self.network.head.t()).float()
        likeliest: list[int] = first_maximum(logits).tolist()
        return [self._columns[column] for column in likeliest]

    def _look(self, pixels: torch.Tensor) -> torch.Tensor:
        (patches,) = self.runner.run((self, "see", len(pixels)), self._see_step, (pixels,))
        return patches

    def _see_step(self, pixels: torch.Tensor) -> Tensors:
        return (self.network.see(pixels),)

    def capture(self) -> None:
        """Record the tower, for every number of pictures that a frame can have."""
        weight = self.network.decoder.embedding.weight
        for num in () if self.runner.reserve is None else range(1, len(self.files.cameras) + 1):
            self._look(weight.new_zeros(num, 3, SIDE, SIDE))

    def draft_with(self, draft: Model) -> None:
        """Refused: no other model is known that writes such codes."""
        raise CheckpointError("--draft-model: pi0fast drafts from its last answer; leave it out")
