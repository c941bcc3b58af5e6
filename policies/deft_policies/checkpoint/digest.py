"""Digests of weight files: equal for equal files, in whatever number format they are served."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*checkpoint*.pt", "pytorch_model*.bin")
_BLOCK_BYTES = 64 * 2**20  # hashed by a thread of its own
_READ_BYTES = 2**20


def digest_weights(folders: Iterable[Path]) -> str:
    """A digest of every byte of the weight files that lie in these folders.

    SHA-256 of the blocks' SHA-256, so that large files are hashed on all cores.
    """
    found = {path for folder in folders for kind in _WEIGHTS for path in folder.glob(kind)}
    files = sorted(found, key=lambda path: (path.name, path))
    starts = [
        (path, start) for path in files for start in range(0, path.stat().st_size, _BLOCK_BYTES)
    ]
    with ThreadPoolExecutor() as threads:
        blocks = list(threads.map(_digest_block, *zip(*starts, strict=True)))
    return hashlib.sha256(b"".join(blocks)).hexdigest()


def _digest_block(path: Path, start: int) -> bytes:
    digest, left = hashlib.sha256(), _BLOCK_BYTES
    with path.open("rb") as file:
        file.seek(start)
        while left and (read := file.read(min(left, _READ_BYTES))):
            digest.update(read)
            left -= len(read)
    return digest.digest()
