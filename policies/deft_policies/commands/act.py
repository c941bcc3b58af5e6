"""`deft act`: answer pictures without a server, one JSON line each."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from msgspec import Struct, structs
from PIL import Image as PillowImage
from PIL import UnidentifiedImageError

from deft_core.errors import WireError
from deft_core.program import CommandParser
from deft_core.types import ActOptions, DecodeTrace, Image, Observation
from deft_core.wire.formats import WireFormat, decode
from deft_policies.base import Policy, PolicyAnswer, PolicyRequest
from deft_policies.commands.parse import parse_command, run_command
from deft_policies.errors import PolicyError, RequestError
from deft_policies.memory import SessionMemory

PROG = "deft act"
_STAGES = ("prepare", "vision", "prefill", "draft", "verify", "judge", "commit", "finish", "total")


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    """What a robot sees and is to do. Cases of one session are frames of one robot, in order.

    Pictures are the image and the wrist cameras, or `cameras` by the names that the policy has for
    them; without an `image` the first of them is the frame.
    """

    instruction: str
    image: str | None = None
    wrist_images: tuple[str, ...] = ()  # in the order in which the model reads them
    state: tuple[float, ...] | None = None
    statistics_key: str | None = None
    session_id: str | None = None
    cameras: dict[str, str] = {}
    max_tokens: int | None = None  # of an answer with reasoning
    reasoning: bool | None = None  # None: where the policy reasons without being asked


def main(arguments: list[str]) -> int:
    """Answer one picture from the command line, or a file of them; return the exit code."""
    parser = CommandParser(
        prog=PROG,
        allow_abbrev=False,
        description="Answer pictures with actions, one JSON line each, without a server.",
    )
    parser.add_argument("image", nargs="?", type=Path, help="a picture (with INSTRUCTION)")
    parser.add_argument("instruction", nargs="?", help="what to do")
    parser.add_argument("--input", type=Path, metavar="JSONL", help="lines with image, instruction")
    parser.add_argument("--output", type=Path, metavar="JSONL", help="default: standard output")
    parser.add_argument(
        "--reasoning",
        action="store_true",
        help="reason before acting, unless a line of --input says not to",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="pictures per pass")

    def run() -> int:
        command = parse_command(parser, arguments)
        flags = command.namespace
        if (flags.input is None) == (flags.instruction is None) or flags.batch < 1:
            parser.error("give either IMAGE and INSTRUCTION, or --input; --batch must be 1 or more")
        if flags.input is None:
            cases = [Case(flags.instruction, str(flags.image))]
        else:
            cases = read_cases(flags.input)
        if flags.reasoning:
            cases = [structs.replace(case, reasoning=case.reasoning is not False) for case in cases]
        policy = command.load()
        if len(cases) > 1:
            policy.warm_up()  # so that the first line's times are like the others
        if flags.reasoning and policy.info.max_tokens is None:
            raise PolicyError(f"--reasoning: {policy.info.policy} writes nothing but actions")
        if flags.input is None:
            request = _request(cases[0], {}, policy)
            policy.check(request.observation, request.options)
        to_file = None if flags.output is None else flags.output.open("w", encoding="utf-8")
        with to_file or nullcontext(sys.stdout) as output:
            for line in answer_cases(policy, cases, flags.batch):
                output.write(line + "\n")
                output.flush()
        return 0

    return run_command(PROG, run)


def read_cases(path: Path) -> list[Case]:
    """Read and check every line before anything slow happens."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        _read_case(line, f"{path}:{number}", path.parent)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def load_image(path: str | Path) -> Image:
    """Read a picture as RGB."""
    try:
        with PillowImage.open(path) as picture:
            return np.array(picture.convert("RGB"))
    except (OSError, UnidentifiedImageError, PillowImage.DecompressionBombError) as error:
        raise PolicyError(f"{path} cannot be read as a picture: {error}") from None


def observe(case: Case) -> Observation:
    """Read the pictures that a case names."""
    cameras = {f"wrist_{index}": load_image(path) for index, path in enumerate(case.wrist_images)}
    cameras |= {name: load_image(path) for name, path in case.cameras.items()}
    # The very array of a camera: a policy that goes by names must not count it twice.
    frame = next(iter(cameras.values())) if case.image is None else load_image(case.image)
    state = None if case.state is None else np.array(case.state, dtype=np.float32)
    return Observation(frame, case.instruction, cameras, state)


def answer_cases(policy: Policy, cases: Sequence[Case], batch_size: int) -> Iterator[str]:
    """Yield one JSON line per case, in order. What a case asks in vain is its own line's error."""
    memories: dict[str | None, SessionMemory] = {}  # by session
    for batch in _batches(cases, batch_size):
        requests = [_request(case, memories, policy) for case in batch]
        refused = [_refusal(policy, request) for request in requests]
        able = [
            request for request, reason in zip(requests, refused, strict=True) if reason is None
        ]
        answers = iter(policy.act(able) if able else ())
        for case, reason in zip(batch, refused, strict=True):
            if reason is not None:
                yield json.dumps({"tokens": [], "actions": [], "passes": 0, "error": str(reason)})
                continue
            answer = next(answers)
            if case.session_id is not None:
                memories[case.session_id] = answer.memory
            yield json.dumps(_describe(answer))


def _batches(cases: Sequence[Case], size: int) -> Iterator[list[Case]]:
    """So many cases at a time, but never two frames of one session."""
    batch: list[Case] = []
    for case in cases:
        sessions = {waiting.session_id for waiting in batch} - {None}
        if len(batch) == size or case.session_id in sessions:
            yield batch
            batch = []
        batch.append(case)
    if batch:
        yield batch


def _refusal(policy: Policy, request: PolicyRequest) -> RequestError | None:
    """What the policy says against a request; None: it can be answered."""
    try:
        policy.check(request.observation, request.options)
    except RequestError as error:
        return error
    return None


def _request(
    case: Case, memories: Mapping[str | None, SessionMemory], policy: Policy
) -> PolicyRequest:
    always = not policy.info.thinks_when_asked
    options = ActOptions(
        statistics_key=case.statistics_key,
        want_trace=True,
        want_reasoning=always if case.reasoning is None else case.reasoning,
        max_tokens=case.max_tokens,
    )
    return PolicyRequest(observe(case), memories.get(case.session_id, SessionMemory()), options)


def _describe(answer: PolicyAnswer) -> dict[str, object]:
    chunk, actions = answer.chunk, answer.chunk.actions.tolist()
    trace = chunk.trace or DecodeTrace("", (), (), (), ())
    # One list per action, but for a single one.
    is_text = chunk.reasoning is not None
    is_chunk = len(actions) > 1 and len(trace.tokens) == chunk.actions.size and not is_text
    described: dict[str, object] = {
        "tokens": np.reshape(trace.tokens, chunk.actions.shape if is_chunk else -1).tolist(),
        "actions": actions,
        "margins": list(trace.margins),
        "passes": trace.num_passes,
        "accepted": list(trace.accepted_lengths),
        "ms": {stage: round(getattr(chunk.timings, f"{stage}_ms"), 3) for stage in _STAGES},
    }
    if chunk.reasoning is not None:
        described["text"] = chunk.reasoning
    if chunk.intervention is not None:
        described["intervention"] = chunk.intervention.value
    if answer.error is not None:
        described["error"] = str(answer.error)
    if len(actions) == 1:
        described["action"] = actions[0]
    return described


def _read_case(line: str, where: str, folder: Path) -> Case:
    try:
        case = decode(line.encode(), Case, WireFormat.JSON)
    except WireError as error:
        raise PolicyError(
            f"{where} must be an object with image and instruction; {error}"
        ) from None
    if case.image is None and not case.cameras:
        raise PolicyError(f"{where} has neither image nor cameras")
    return structs.replace(
        case,
        image=None if case.image is None else _find_image(case.image, where, folder),
        wrist_images=tuple(_find_image(image, where, folder) for image in case.wrist_images),
        cameras={name: _find_image(image, where, folder) for name, image in case.cameras.items()},
    )


def _find_image(name: str, where: str, folder: Path) -> str:
    """Paths may be relative to the file that names them."""
    existing = next((path for path in (Path(name), folder / name) if path.exists()), None)
    if existing is None:
        raise PolicyError(f"{where}: image {name} does not exist")
    return str(existing)
