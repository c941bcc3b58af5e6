"""Opens and loads pi0-FAST's checkpoints, as LeRobot saves them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from deft_policies.base import Finding, Verdict
from deft_policies.checkpoint.open import (
    CheckpointSource,
    check_memory,
    check_tensors,
    fill_network,
)
from deft_policies.checkpoint.tensor_file import find_tensors
from deft_policies.decoding.captured import Layout, shapes_of
from deft_policies.errors import CheckpointError
from deft_policies.families.family import (
    DTYPES,
    Family,
    choose_device,
    choose_precision,
    choose_runner,
    fuse_kernels,
)
from deft_policies.families.options import ModelOptions
from deft_policies.families.pi0fast.files import is_pi0_fast, read_files
from deft_policies.families.pi0fast.findings import find_costs, find_traps
from deft_policies.families.pi0fast.model import WIDEST, Pi0Fast
from deft_policies.families.pi0fast.network import (
    HEAD,
    TABLE,
    PaliGemma,
    Pi0FastConfig,
    find_places,
    kept,
    our_name,
    read_sizes,
)
from deft_policies.families.pi0fast.words import find_folder, read_words
from deft_policies.families.qwenfast.policy_files import doubts_of
from deft_policies.fast.files import read_codec
from deft_policies.fast.grammar import ChunkGrammar
from deft_policies.model.formats import Quantization
from deft_policies.model.graphs import Reserve, StepRunner
from deft_policies.model.quantization import check_quantization
from deft_policies.model.tensor_names import TensorPlace

KEY = "default"  # a checkpoint has statistics of one data set
_USUAL_PROMPT = 40  # ids of a short one


class Pi0FastFamily(Family):
    """Chunks of actions, written as FAST codes by PaliGemma."""

    name = Pi0Fast.family
    config: Pi0FastConfig
    writes_codes = True
    pads_state = True
    refuses = ("--prompt", "--pictures", "--image-chain", "--adapter")
    refusal = "a checkpoint of pi0fast says all of this itself; leave it out"

    def __init__(self, source: CheckpointSource | None, options: ModelOptions) -> None:
        """Raises `CheckpointError` for what is wrong, and for flags that say nothing to it."""
        super().__init__(source, options)
        if source is None:
            raise CheckpointError(
                "--family pi0fast needs a checkpoint: random weights have no words"
            )
        if options.quantization not in (Quantization.NONE, Quantization.INT8):
            raise CheckpointError(
                f"--quantization {options.quantization.value}: pi0fast is served in int8 or "
                "unquantized; other formats were never compared"
            )
        directory = source.directory
        self.files = files = read_files(directory)
        if options.num_steps not in (None, files.horizon):
            raise CheckpointError(
                f"--chunk {options.num_steps}: the checkpoint's chunk_size is {files.horizon}"
            )
        self.words = words = read_words(find_folder(directory, files.text_tokenizer))
        fast = find_folder(directory, files.fast_tokenizer)
        self.codec = codec = read_codec(fast)
        self._doubts = doubts_of(fast, codec, files.horizon, files.action_dim)
        self._stored = {our_name(name): tensor for name, tensor in find_tensors(directory).items()}
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        llm, tower = read_sizes(shapes, directory)
        codes = words.code_ids(len(codec.pieces), files.num_skipped)
        answer_ids = sorted({*codes, *words.prefix, words.end})
        if answer_ids[0] < 0 or answer_ids[-1] >= llm.vocabulary:
            raise CheckpointError(
                f"{directory}: {len(codec.pieces)} codes below the {words.num_text} words of the "
                f"tokenizer are no rows of a table of {llm.vocabulary}; tokenizers and weights are "
                "of different models"
            )
        if {*words.prefix, words.end} & {*codes}:
            raise CheckpointError(
                f"{directory}: the {len(codec.pieces)} codes reach down to the words of an answer; "
                "the FAST tokenizer is another model's"
            )
        ChunkGrammar(codec.pieces, files.horizon * files.action_dim)
        self.has_grammar = options.grammar == "on"
        rows = tuple(answer_ids) if self.has_grammar else ()
        longest = len(files.cameras) * tower.num_patches + files.max_prompt + 1
        positions = longest + self.longest_answer + WIDEST + 1
        llm = replace(llm, max_positions=positions, vocabulary=len(rows) or llm.vocabulary)
        self.config = Pi0FastConfig(
            llm=llm,
            tower=tower,
            num_rows=shapes[HEAD if HEAD in shapes else TABLE][0],
            stored=tuple(name for name in (TABLE, HEAD) if name in shapes),
            answer_ids=rows,
            statistics={KEY: files.statistics},
        )
        check_tensors(directory, shapes, find_places(self.config))
        self.summary = (
            f"pi0fast: {files.horizon} actions of {files.action_dim}, as FAST codes, from "
            f"{len(files.robot_cameras)} camera(s) and {files.state.dim} numbers of state"
        )

    @staticmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """By the type that its `config.json` gives."""
        return source is not None and is_pi0_fast(source.directory)

    @property
    def places(self) -> Sequence[TensorPlace]:
        """As they are kept: one table where it is the head, too, and the rows of answers."""
        with torch.device("meta"):
            network = PaliGemma(self.config)
        shared = {"decoder.head.weight"} if self.config.is_tied and not self.has_grammar else set()
        return [
            TensorPlace(name, tuple(parameter.shape), name)
            for name, parameter in network.named_parameters()
            if name not in shared
        ]

    @property
    def longest_answer(self) -> int:
        """Tokens: with a grammar there is room for two for a coefficient."""
        files, options = self.files, self.options
        usual = 2 * files.horizon * files.action_dim + len(self.words.prefix) + 1
        if options.grammar == "on":  # it bounds answers itself
            return max(usual, files.max_tokens)
        return options.max_tokens or files.max_tokens

    @property
    def reserve(self) -> Reserve:
        """What passes are captured for: all cameras and a prompt of any length."""
        pictures = len(self.files.robot_cameras) * self.config.tower.num_patches
        shortest, longest = pictures + _USUAL_PROMPT, pictures + self.files.max_prompt + 1
        return Reserve(self.options.largest_batch, min(shortest, longest), longest)

    def planned_bytes(self, dtype: torch.dtype) -> Mapping[str, int]:
        """Of the decoder's passes; the tower's are small in comparison."""
        layout = Layout(self.reserve, WIDEST, self.longest_answer + 1)
        num_graphs = len(shapes_of(self.reserve, WIDEST, False))
        return layout.bytes_of(self.config.llm, dtype.itemsize, num_graphs)

    def findings(self) -> list[Finding]:
        """Traps that cost users their success without a word."""
        num_codes, options, files = len(self.codec.pieces), self.options, self.files
        traps = find_traps(files, self.words, self.config, num_codes, options.pads_state)
        precision, _ = choose_precision(options, choose_device(options.device))
        num_cameras = len(files.robot_cameras)
        costs = find_costs(self.config, self.places, num_cameras, DTYPES[precision])
        doubts = [Finding("answers", Verdict.DOUBTFUL, doubt) for doubt in self._doubts]
        return [*traps, *doubts, costs]

    def load(
        self, device: torch.device, dtype: torch.dtype, runner: StepRunner | None = None
    ) -> Pi0Fast:
        """Read the weights."""
        options = self.options
        check_quantization(options.quantization, device, dtype)
        check_memory(self.places, device, dtype, options.quantization)
        with torch.device("meta"):
            network = PaliGemma(self.config).to(dtype)
        places = find_places(self.config)
        fill_network(network, places, self._stored, kept, device, options.quantization)
        network.share_rows()
        fuse_kernels(network, options, device, by_default=False)
        runner = runner or choose_runner(options, device, self.reserve)
        return Pi0Fast(
            network,
            self.files,
            self.words,
            self.codec,
            runner,
            self.longest_answer,
            options.pads_state,
        )
