"""`deft key NAME`: make an API key and the lines that let it in."""

import hashlib
import json
import secrets
import sys

from deft_core.program import CommandParser

KEY_BYTES = 24


def main(arguments: list[str]) -> int:
    """Print a fresh key and its entry for the key file."""
    parser = CommandParser(
        prog="deft key",
        description="Make an API key: print it, and the lines for the server's --keys-file. The "
        "file holds only its SHA-256, so the key is shown once and never again.",
    )
    parser.add_argument("name", help="who will use it, such as arm-1")
    parser.add_argument("--admin", action="store_true", help="may use /v1/admin")
    parser.add_argument("--rate-per-s", type=float, metavar="X", help="frames per second")
    options = parser.parse_args(arguments)
    key = secrets.token_urlsafe(KEY_BYTES)
    lines = [
        f"[{json.dumps(options.name)}]",
        f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"',
    ]
    if options.admin:
        lines.append("admin = true")
    if options.rate_per_s is not None:
        lines.append(f"rate_per_s = {options.rate_per_s}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stderr.write(f"the key of {options.name}: {key}\n")
    return 0
