"""Number formats of weights. Imports nothing heavy: flags name them."""

from enum import Enum


class Precision(Enum):
    """Number format of the weights and the arithmetic."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quantization(Enum):
    """Number format of the decoder's matrices in memory."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
