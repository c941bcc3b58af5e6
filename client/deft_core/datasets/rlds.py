"""RLDS episodes as TensorFlow Datasets stores them, read without TensorFlow.

A record of a TFRecord file is a length, a checksum of the length, the payload and its checksum. The
payload is a protocol buffer: `tf.train.Example`, a map from names such as `steps/action` to a list
of bytes, floats or integers that holds all steps of one episode one after the other. What shape a
step has is in `features.json`. The payloads' own checksums are not computed (that takes longer than
all the rest in Python); a damaged payload shows in the parts not adding up.

The LIBERO sets that OpenVLA's fine-tunes learned from keep robosuite's gripper; their names begin
with `libero`, and they are brought into the fine-tunes' dialect like LIBERO's HDF5 files.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_core.datasets.demonstrations import decode_frame
from deft_core.datasets.episodes import DatasetError, StoredEpisode, StoredStep, pick_cameras
from deft_core.peers.conventions import from_robosuite
from deft_core.types import Observation

_LENGTH = struct.Struct("<QI")
_MAX_RECORD_BYTES = 1 << 31
_OBSERVATION = "steps/observation/"
_INSTRUCTIONS = ("steps/language_instruction", "steps/observation/natural_language_instruction")

Values = list[bytes] | NDArray[np.float32] | NDArray[np.int64]


# What a step has, by name: the shape of its numbers, or the word that says what else it is.
Features = Mapping[str, tuple[int, ...] | str]


def find_versions(path: Path) -> list[Path]:
    """The prepared data sets at or below a folder: those with a description of their features."""
    return sorted(one.parent for one in path.rglob("features.json")) if path.is_dir() else []


def read_rlds(path: Path, cameras: Sequence[str]) -> Iterator[StoredEpisode]:
    """Yield the episodes of all shards, in the order of their names."""
    for folder in find_versions(path):
        features = _features(folder)
        files = sorted(folder.glob("*.tfrecord*"))
        if not files:
            raise DatasetError(f"{folder}: describes features, but holds no .tfrecord files")
        for file in files:
            for number, offset in enumerate(_offsets(file)):
                steps = partial(_steps, file, offset, features, cameras)
                yield StoredEpisode(f"{file}:{number}", steps)


def read_example(payload: bytes) -> dict[str, Values]:
    """The lists of a `tf.train.Example` by name; DatasetError where it is not one."""
    found: dict[str, Values] = {}
    try:
        for features in _fields(payload, 1):
            for entry in _fields(features, 1):
                (name,) = _fields(entry, 1)
                (feature,) = _fields(entry, 2)
                found[bytes(name).decode()] = _values(feature)
    except (ValueError, IndexError, struct.error) as error:
        raise DatasetError(f"a record is not an example: {error}") from error
    return found


def _steps(
    file: Path, offset: int, features: Features, cameras: Sequence[str]
) -> Iterator[StoredStep]:
    example = _read_record(file, offset)
    actions = _rows(example, "steps/action", features, file).astype(np.float64)
    if file.name.startswith("libero"):
        actions = from_robosuite(actions)
    there = tuple(
        name.removeprefix(_OBSERVATION)
        for name, feature in sorted(features.items())
        if feature == "image" and name.startswith(_OBSERVATION)
    )
    if not cameras and "image" in there:
        there = ("image",)
    own, further = pick_cameras(there, cameras, file)
    pictures = {
        camera: _contents(example, _OBSERVATION + camera, len(actions), file)
        for camera in (own, *further)
    }
    texts = _texts(example, len(actions), file)
    state = None
    if f"{_OBSERVATION}state" in features:
        state = _rows(example, f"{_OBSERVATION}state", features, file).astype(np.float32)
    for index, action in enumerate(actions):
        try:
            observation = Observation(
                decode_frame(pictures[own][index]),
                texts[index],
                {camera: decode_frame(pictures[camera][index]) for camera in further},
                None if state is None else state[index],
            )
        except (OSError, ValueError) as error:
            raise DatasetError(f"{file}: step {index} of an episode: {error}") from error
        yield StoredStep(observation, action)


def _features(folder: Path) -> Features:
    """The features of a step by their names in an example."""
    try:
        described = json.loads((folder / "features.json").read_text("utf-8"))
        return dict(_walk("", described))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"{folder}/features.json: not a description of features: {error}"
        ) from error


def _walk(name: str, described: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...] | str]]:
    if "featuresDict" in described:
        for key, inner in described["featuresDict"]["features"].items():
            yield from _walk(f"{name}/{key}" if name else key, inner)
    elif "sequence" in described:
        yield from _walk(name, described["sequence"]["feature"])
    elif "image" in described:
        yield name, "image"
    elif "tensor" in described:
        sizes = described["tensor"].get("shape", {}).get("dimensions", ())
        yield name, tuple(int(size) for size in sizes)


def _rows(
    example: Mapping[str, Values], name: str, features: Features, file: Path
) -> NDArray[np.float32] | NDArray[np.int64]:
    """[step, size] of a list of numbers."""
    values, shape = example.get(name), features.get(name)
    if (
        values is None
        or isinstance(values, list)
        or not isinstance(shape, tuple)
        or len(shape) != 1
    ):
        raise DatasetError(f"{file}: no numbers called {name} with one axis per step")
    if len(values) % shape[0]:
        raise DatasetError(f"{file}: {name} has {len(values)} numbers, {shape[0]} per step")
    return values.reshape(-1, shape[0])


def _contents(example: Mapping[str, Values], name: str, count: int, file: Path) -> list[bytes]:
    """A list of bytes with one entry per step."""
    values = example.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise DatasetError(f"{file}: {name} does not hold one entry for each of {count} steps")
    return values


def _texts(example: Mapping[str, Values], count: int, file: Path) -> list[str]:
    name = next((one for one in _INSTRUCTIONS if one in example), None)
    if name is None:
        raise DatasetError(f"{file}: no instruction; looked for {', '.join(_INSTRUCTIONS)}")
    return [one.decode("utf-8", "replace") for one in _contents(example, name, count, file)]


def _offsets(file: Path) -> Iterator[int]:
    """Where the records of a file begin."""
    size, offset = file.stat().st_size, 0
    with file.open("rb") as opened:
        while offset < size:
            opened.seek(offset)
            head = opened.read(_LENGTH.size)
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
            end = offset + _LENGTH.size + length + 4
            if end > size or _LENGTH.unpack(head)[1] != _masked_checksum(head[:8]):
                raise DatasetError(f"{file}: damaged or cut off at byte {offset}")
            yield offset
            offset = end


def _read_record(file: Path, offset: int) -> dict[str, Values]:
    with file.open("rb") as opened:
        opened.seek(offset)
        length = _LENGTH.unpack(opened.read(_LENGTH.size))[0]
        if length > _MAX_RECORD_BYTES:
            raise DatasetError(f"{file}: a record of {length} bytes is larger than is read here")
        return read_example(opened.read(length))


def _masked_checksum(content: bytes) -> int:
    """CRC-32C as TFRecord files mask it; bit by bit, as only lengths are checked."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(content: bytes | memoryview, wanted: int) -> Iterator[memoryview]:
    """The length-delimited fields of a number in a protocol buffer message."""
    view, at = memoryview(content), 0
    while at < len(view):
        key, at = _varint(view, at)
        number, kind = key >> 3, key & 7
        if kind == 2:
            length, at = _varint(view, at)
            if at + length > len(view):
                raise ValueError("a part is longer than the whole")
            if number == wanted:
                yield view[at : at + length]
            at += length
        elif kind == 0:
            _, at = _varint(view, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")


def _values(feature: memoryview) -> Values:
    """The one list of a feature: bytes (1), floats (2) or integers (3)."""
    for inner in _fields(feature, 1):
        return [bytes(one) for one in _fields(inner, 1)]
    for inner in _fields(feature, 2):
        packed = b"".join(_fields(inner, 1))
        return np.frombuffer(packed or _unpacked_floats(inner), dtype="<f4")
    for inner in _fields(feature, 3):
        return _integers(b"".join(_fields(inner, 1)))
    return []


def _unpacked_floats(content: memoryview) -> bytes:
    """Floats written one by one, a key byte before each."""
    return b"".join(bytes(content[at + 1 : at + 5]) for at in range(0, len(content), 5))


def _integers(packed: bytes) -> NDArray[np.int64]:
    view, at, found = memoryview(packed), 0, []
    while at < len(view):
        value, at = _varint(view, at)
        found.append(value - (1 << 64) if value >> 63 else value)
    return np.array(found, dtype=np.int64)
