"""`deft serve`: load a policy and answer observations until told to stop."""

import argparse
import sys

import uvicorn

from deft_policies import catalog
from deft_server.app import create_app
from deft_server.settings import Settings

DEFAULT_POLICY = "constant"


def main(arguments: list[str]) -> int:
    """Serve; return the exit code."""
    first = argparse.ArgumentParser(prog="deft serve", add_help=False)
    first.add_argument("--policy", default=DEFAULT_POLICY)
    name = first.parse_known_args(arguments)[0].policy
    entry = catalog.find(name)
    parser = argparse.ArgumentParser(prog="deft serve", allow_abbrev=False)
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--host", default=argparse.SUPPRESS)
    parser.add_argument("--port", default=argparse.SUPPRESS)
    entry.add_flags(parser.add_argument_group(f"policy {name}", entry.summary))
    namespace = parser.parse_args(arguments)
    known = {key: value for key, value in vars(namespace).items() if key in Settings.model_fields}
    settings = Settings(**known)
    app = create_app(lambda: entry.load(namespace), settings)
    sys.stderr.write(f"deft: serving {name} on http://{settings.host}:{settings.port}\n")
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        ws_max_size=settings.max_body_bytes,
    )
    return 0
