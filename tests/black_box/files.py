"""What the product writes to disk, and what it makes of files that were written at cf614d6."""

import base64
import json
import re
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors import safe_open

from deft_client import ActOptions, Observation, PolicyClient, Recorder
from tests.black_box.exchanges import MASK, brief_trace, masked, shown
from tests.black_box.product import (
    CLIENT,
    FILES,
    SERVER,
    TINY_FLAGS,
    Ended,
    run,
    run_apart,
    serving,
)

TARGET = tuple(one for one in TINY_FLAGS if one not in ("--policy", "openvla"))
RUN = "point_world-solve"
POINT_WORLD = ("eval", "point_world", "--environment", "point_world", "--local-policy", "solve")
SMALL_RUN = ("steps=4", "batch_size=2", "held_out_share=0.5", "save_every=2", "log_every=1")


def make(folder: Path) -> None:
    """Write a file of every kind: recordings, features, a run, a draft head, results."""
    pictures = np.random.default_rng(5).integers(0, 256, (2, 2, 4, 4, 3), np.uint8)
    with (
        serving(
            *TINY_FLAGS, "--record", str(folder / "server"), "--draft-head", str(HEAD)
        ) as server,
        PolicyClient(f"http://{server.address}") as client,
        Recorder(client, folder / "recorder") as recorder,
    ):
        for episode in pictures:
            recorder.reset("arm-1")
            for small in episode:
                image = small.repeat(8, axis=0).repeat(8, axis=1)
                options = ActOptions(session_id="arm-1", want_trace=True)
                recorder.act(Observation(image, "pick up the butter"), options)
        server.stop()
    made = str(folder / "recorder")
    features, head, trained = (str(folder / name) for name in ("features", "draft_head", "run"))
    ended(SERVER, "train", "record", made, *TARGET, "--out", features)
    fit(features, trained)
    ended(SERVER, "train", "export", trained, *TARGET, "--out", head)
    ended(CLIENT, *POINT_WORLD, "--episodes", "3", "--out", str(folder / "results"))


HEAD = FILES / "draft_head"


def fit(features: str, trained: str, *more: str) -> Ended:
    chosen = [f"--set={one}" for one in (*SMALL_RUN, "optimizer.warm_up_steps=1", *more)]
    return ended(SERVER, "train", "fit", "--features", features, *TARGET, "--out", trained, *chosen)


def ended(module: str, *arguments: str) -> Ended:
    """Run a command that must succeed; the client's plays in processes of its own."""
    result = (run_apart if module == CLIENT else run)(module, *arguments)
    assert result.code == 0, result
    return result


def written() -> dict[str, Any]:
    """Everything that is written today."""
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        return described(Path(folder))


def described(folder: Path) -> dict[str, Any]:
    """The files of a folder by name, with what can be said of each without reading it as we do."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    told: dict[str, Any] = {}
    for path in paths:
        name = str(path.relative_to(folder))
        if path.suffix == ".deftrec":  # the time is in its name
            name = f"{path.relative_to(folder).parts[0]}/{re.sub('[0-9a-f]{4,}|[0-9]', '#', name)}"
            name = f"{name} ({sum(one.startswith(name) for one in told) + 1})"
        told[name] = content(path)
    return told


def content(path: Path) -> Any:
    if path.suffix == ".deftrec":
        return [steady(one) for one in records(path.read_bytes())]
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as tensors:
            named = {name: tensors.get_slice(name) for name in sorted(tensors.keys())}
            shapes = {name: [one.get_dtype(), one.get_shape()] for name, one in named.items()}
            return {"metadata": steady(tensors.metadata()), "tensors": shapes}
    if path.suffix == ".pt":
        return tensors_in(torch.load(path, weights_only=True))
    if path.suffix == ".json":
        return steady(json.loads(path.read_text()))
    if path.name == "metrics.jsonl":  # losses are those of this processor
        return [list(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".jsonl":
        return [steady(json.loads(line)) for line in path.read_text().splitlines()]
    return "empty" if not path.stat().st_size else "not empty"


def records(data: bytes) -> Iterator[Any]:
    """The records of a recording: after a signature each has its length and its checksum."""
    assert data[:8] == b"DEFTREC1"
    at = 8
    while at < len(data):
        (length, _) = struct.unpack_from("<II", data, at)
        yield unpacked(msgpack.unpackb(data[at + 8 : at + 8 + length]))
        at += 8 + length


def unpacked(value: Any) -> Any:
    """Messages inside of a record, too."""
    if isinstance(value, dict):
        return {name: unpacked(one) for name, one in value.items()}
    if isinstance(value, bytes) and value[:1] and (value[0] >> 4 == 8 or value[0] == 0xDE):  # a map
        return msgpack.unpackb(value)
    return value


def steady(value: Any, name: str = "") -> Any:
    """Without times, what they are counted from, and digests of code and machine."""
    if name == "trace" and isinstance(value, dict):
        return brief_trace(value)
    if isinstance(value, dict) and "zlib_f8" in value:
        numbers = np.frombuffer(zlib.decompress(base64.b64decode(value["zlib_f8"])), "<f8")
        return {**value, "zlib_f8": steady(shown(numbers))}
    if name == "sources":  # paths
        return [MASK] * len(value)
    if isinstance(value, dict):
        plain = masked(value, name)
        if not isinstance(plain, dict) or "keys" in plain:
            return plain
        return {key: steady(one, key) for key, one in value.items()}
    if isinstance(value, list):
        if name.endswith("_ms"):
            return [MASK] * len(value)
        return [steady(one) for one in value]
    if name in UNSTEADY or name.endswith("_s") and isinstance(value, float):
        return MASK
    return masked(value, name)


UNSTEADY = {
    *(
        "run",
        "created",
        "started_at",
        "machine",
        "deft-client",
        "deft-vla",
        "time",
        "started",
        "client",
    ),
    *("finished_s", "wall_s", "at_s", "sha256", "crc32", "target"),
}


def tensors_in(value: Any) -> Any:
    """Dtypes and shapes of the tensors of a state."""
    if isinstance(value, dict):
        return {str(name): tensors_in(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [tensors_in(one) for one in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape)]
    return value if isinstance(value, int | str) else type(value).__name__


def read() -> dict[str, Any]:
    """What today's commands make of the copies from then."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("run", "results"):
            shutil.copytree(FILES / name, folder / name)
        trained, results, head = (str(folder / name) for name in ("run", "results", "head"))
        features, recorded = str(folder / "features"), str(FILES / "recorder")
        ended(SERVER, "train", "record", recorded, *TARGET, "--out", features)
        ended(SERVER, "train", "export", trained, *TARGET, "--out", head)
        same = (folder / "head" / "model.safetensors").read_bytes()
        told: dict[str, Any] = {
            "exported head is the same": same == (HEAD / "model.safetensors").read_bytes(),
            "run goes on": said(fit(features, trained, "steps=6")),
            "metrics afterwards": content(folder / "run" / "metrics.jsonl"),
            "head is judged": said(
                ended(
                    SERVER,
                    *("train", "evaluate", recorded, *TARGET, "--head", str(HEAD)),
                )
            ),
        }
        for kind in ("server", "recorder"):
            recording = str(FILES / kind)
            told[f"{kind}: shown"] = said(
                ended(CLIENT, "datasets", "show", recording), numbers=True
            )
            replayed = ended(SERVER, "replay", recording, *TARGET)
            told[f"{kind}: replayed"] = said(replayed)
            told[f"{kind}: the same tokens"] = "same tokens: 100" in replayed.out
        told["results go on"] = said(
            ended(CLIENT, *POINT_WORLD, "--episodes", "4", "--out", results)
        )
        episodes = content(folder / "results" / RUN / "episodes.jsonl")
        told["episodes afterwards"] = [[one["task"], one["outcome"]] for one in episodes]
        page = folder / "report.html"
        told["results reported"] = said(ended(CLIENT, "report", results, "--out", str(page)))
        told["files of the report"] = sorted(
            path.name for path in folder.iterdir() if path.is_file()
        )
        # What is said of times, of times from then alone: those of today are this machine's.
        then = str(FILES / "results" / RUN)
        told["results compared"] = said(run_apart(CLIENT, "compare", then, then))
        return told


def said(command: Ended, numbers: bool = False) -> list[str]:
    """Its lines; without numbers where they are those of this machine's speed."""
    text = re.sub(r"\S*/\S*", MASK, command.out)
    text = text if numbers else re.sub(r"[-+]?\d+(\.\d+)?", "#", text)
    text = re.sub("-{3,}", "---", text)  # as wide as the longest number of a column
    return [re.sub(" {2,}", "  ", line.rstrip()) for line in text.splitlines()]


RECORDINGS = {"files_written": written, "files_read": read}
