"""Messages as GR00T's clients send them."""

from io import BytesIO

import msgpack
import numpy as np

FRAME = np.arange(2 * 1 * 8 * 6 * 3, dtype=np.uint8).reshape(2, 1, 8, 6, 3)
OBSERVATION = {
    "video": {"image": FRAME, "wrist": FRAME[:, :, :4]},
    "state": {"arm": np.zeros((2, 1, 7), np.float32), "hand": np.ones((2, 1, 1), np.float32)},
    "language": {"annotation.human.action.task_description": [["lift"], ["push"]]},
}
FLAT = {
    "video.image": FRAME[0],
    "state.arm": np.zeros((1, 7), np.float32),
    "annotation.human.action.task_description": ["lift"],
}


def as_npy(array: object) -> dict[str, object]:
    file = BytesIO()
    np.save(file, array)  # type: ignore[arg-type]
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def packed(endpoint: str, **fields: object) -> bytes:
    return bytes(msgpack.packb({"endpoint": endpoint, **fields}, default=as_npy))
