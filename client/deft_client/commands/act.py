"""`deft-client act frame.png "pick up the butter ..."`: send one picture, print the actions."""

import argparse
import sys
from pathlib import Path

import numpy as np

from deft_client.client import PolicyClient
from deft_client.commands.connection import (
    add_connection_options,
    add_url_word,
    connection_settings,
    parse_connected,
    reported,
)
from deft_client.errors import NoActionError
from deft_core.errors import UsageError, WireError
from deft_core.methods import method_text
from deft_core.program import CommandParser
from deft_core.reasoning import ACTION, parse_reasoning
from deft_core.types import ActionChunk, ActOptions, Image, Observation
from deft_core.wire.codec import encode_answer
from deft_core.wire.formats import WireFormat
from deft_core.wire.images import ImageEncoding, decode_image


def main(arguments: list[str]) -> int:
    """Print the actions for a picture and an instruction."""
    options = parse_connected(_parser(), arguments)
    return reported(lambda: _act(options), "act")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("deft-client act", description=__doc__)
    parser.add_argument("image", type=Path, help="a PNG or JPEG of what the main camera sees")
    parser.add_argument("instruction", help="what to do, in the words that the policy was taught")
    add_url_word(parser)
    add_connection_options(parser)
    parser.add_argument(
        "--camera", action="append", default=[], metavar="NAME=FILE", help="a further camera"
    )
    parser.add_argument("--state", metavar="N,N,...", help="the robot's state, as numbers")
    parser.add_argument("--statistics-key", metavar="KEY", help="which action statistics to use")
    parser.add_argument(
        "--decoding", metavar="NAME", help="a decoding method of the server, or .toml"
    )
    parser.add_argument("--radius", type=int, metavar="BINS", help="its acceptance radius")
    parser.add_argument("--deadline-ms", type=float, metavar="MS", help="useless after this long")
    parser.add_argument("--session", metavar="ID", help="continue a session")
    parser.add_argument(
        "--encoding", choices=[one.value for one in ImageEncoding], default="raw",
        help="how the picture travels; jpeg changes pixels (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--stream", action="store_true", help="use the WebSocket")
    parser.add_argument("--trace", action="store_true", help="ask how the action was decoded")
    parser.add_argument("--reasoning", action="store_true", help="think aloud, where it can")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of such an answer; the server bounds it"
    )
    parser.add_argument("--json", action="store_true", help="print the whole answer as JSON")
    return parser


def _act(options: argparse.Namespace) -> int:
    observation = _observation(options)
    settings = connection_settings(options, ImageEncoding(options.encoding))
    client_class = PolicyClient
    if options.stream:
        from deft_client.stream import StreamClient

        client_class = StreamClient
    with client_class(options.url, settings) as policy:
        try:
            chunk = policy.act(observation, _act_options(options))
        except NoActionError as error:
            sys.stdout.writelines(f"{line}\n" for line in _said(error.reasoning))
            raise
    line = encode_answer(chunk, wire_format=WireFormat.JSON).decode() + "\n"
    sys.stdout.write(line if options.json else _table(chunk))
    return 0


def _observation(options: argparse.Namespace) -> Observation:
    cameras = {}
    for pair in options.camera:
        name, equals, path = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--camera takes NAME=FILE, got {pair!r}")
        cameras[name] = _load_image(Path(path))
    try:
        state = None
        if options.state is not None:
            state = np.array([float(part) for part in options.state.split(",")], np.float32)
        return Observation(_load_image(options.image), options.instruction, cameras, state)
    except ValueError as error:
        raise UsageError(f"--state takes finite numbers with commas between: {error}") from error


def _act_options(options: argparse.Namespace) -> ActOptions:
    return ActOptions(
        session_id=options.session,
        deadline_ms=options.deadline_ms,
        statistics_key=options.statistics_key,
        decoding=options.decoding and method_text(options.decoding),
        radius=options.radius,
        want_trace=options.trace,
        want_reasoning=options.reasoning,
        max_tokens=options.max_tokens,
        want_notes=True,
    )


def _load_image(path: Path) -> Image:
    try:
        return decode_image(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read the picture: {error}") from error
    except WireError as error:
        raise UsageError(str(error)) from error


def _said(text: str) -> list[str]:
    """A line for each part; a terminal obeys what cannot be printed, so that it is left out."""
    parts = [one for one in parse_reasoning(text).parts if one.tag != ACTION]
    lines = [f"{one.tag}: {' '.join(one.text.split())}" for one in parts]
    return ["".join(filter(str.isprintable, line)) for line in lines]


def _table(chunk: ActionChunk) -> str:
    rows = ["  ".join(f"{value:+.5f}" for value in action) for action in chunk.actions.tolist()]
    lines = [f"action {step}:  {row}" for step, row in enumerate(rows)]
    lines[:0] = _said(chunk.reasoning or "")
    spent = {name: value for name, value in vars(chunk.timings).items() if value}
    lines.append("  ".join(f"{name} {value:.2f}" for name, value in spent.items()))
    lines += [f"note: {one}" for one in chunk.notes]
    if chunk.intervention is not None:
        lines.append(f"the server intervened: {chunk.intervention.value}")
    if chunk.trace is not None:
        trace = chunk.trace
        lines.append(
            f"decoded by {trace.method} in {trace.num_passes} passes, "
            f"accepted {list(trace.accepted_lengths)}, tokens {list(trace.tokens)}"
        )
    return "\n".join(lines) + "\n"
