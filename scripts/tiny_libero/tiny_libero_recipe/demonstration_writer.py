"""Writes demonstrations; `deft_core.datasets.demonstrations` reads them."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PillowImage

from deft_core.datasets.demonstrations import COLUMNS, Demonstration, checksum
from deft_core.files import write_atomically
from deft_core.types import Image

JPEG_QUALITY = 95


def encode_frame(image: Image, encoding: str) -> bytes:
    """A picture as a JPEG (quality 95, colour at half resolution) or a PNG file."""
    buffer = io.BytesIO()
    picture = PillowImage.fromarray(image)
    if encoding == "png":
        picture.save(buffer, "PNG", compress_level=6)
    else:
        picture.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=2)
    return buffer.getvalue()


def save_demonstration(path: Path, demonstration: Demonstration) -> None:
    """Write an episode so that the file is either whole or not there."""
    ends = np.cumsum([len(one) for one in demonstration.encoded], dtype=np.int64)
    arrays: dict[str, NDArray[np.generic]] = {
        "frames": np.frombuffer(b"".join(demonstration.encoded), dtype=np.uint8),
        "frame_ends": ends,
        **{name: getattr(demonstration, name) for name in COLUMNS},
    }
    header = {**asdict(demonstration.header), "sha256": checksum(arrays)}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())
