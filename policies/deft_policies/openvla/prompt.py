"""Instruction to prompt text. Lower-cases it and changes nothing else, as in training."""

from enum import Enum

_OPENVLA = "In: What action should the robot take to {instruction}?\nOut:"
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: What action should the "
    "robot take to {instruction}? ASSISTANT:"
)


class PromptTemplate(Enum):
    """What the instruction is wrapped in; `V01` is the first release's, on top of Vicuna."""

    OPENVLA = "openvla"
    V01 = "v01"

    def fill(self, instruction: str) -> str:
        """Return the prompt for an instruction."""
        template = _VICUNA if self is PromptTemplate.V01 else _OPENVLA
        return template.replace("{instruction}", instruction.lower())
