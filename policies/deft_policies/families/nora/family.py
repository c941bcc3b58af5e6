"""Opens and loads checkpoints of NORA: Qwen2.5-VL that answers with FAST codes."""

from pathlib import Path

from deft_policies.checkpoint.open import CheckpointSource
from deft_policies.families.nora.model_folder import is_nora, read_folder
from deft_policies.families.options import ModelOptions
from deft_policies.families.qwenfast.family import FastFamily
from deft_policies.families.qwenfast.policy_files import PolicyFiles


class NoraFamily(FastFamily):
    """NORA, NORA-long and their fine-tunes."""

    name = "nora"

    @staticmethod
    def matches(source: CheckpointSource | None, options: ModelOptions) -> bool:
        """Whether it is Qwen2.5-VL that has action tokens."""
        return source is not None and is_nora(source.directory)

    def read_files(self, folder: Path) -> PolicyFiles:
        """One folder; `--chunk` says what no file says."""
        return read_folder(folder, self.options.num_steps)
