"""`make demo`: serve the policy that ships with Deft, play LIBERO against it, write a report.

The same three episodes are played with plain decoding, with speculation that changes nothing
(`lossless`), and with speculation that may be off by a little (`deft`).
"""

import shutil
import sys
from pathlib import Path

from deft_client import PolicyClient
from deft_client.libero.commands import evaluate as evaluate_command
from deft_client.libero.commands import report as report_command
from deft_server.reproduce.local_server import ServerDidNotStartError, local_server

FOLDER = Path("results/demo")
DECODINGS = ("autoregressive", "lossless", "deft")
SUITE, TASKS, TRIAL = "libero_object", "0,6,7", "40"  # trials from 40 were never trained on


def main() -> int:
    """Run the demonstration; return its exit code."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    print("starting the server ...", flush=True)
    try:
        with local_server("--policy", "tiny-libero") as url:
            with PolicyClient(url) as client:
                print(f"ready at {url}: {client.info().policy}", flush=True)
            code = evaluate_command.main(
                [
                    *(SUITE, "--tasks", TASKS, "--trials", TRIAL, "--url", url, "--stream"),
                    *("--assets", "stand-in"),  # what the policy was trained on
                    *("--decoding", *DECODINGS, "--video", "all", "--out", str(FOLDER)),
                ]
            )
    except ServerDidNotStartError as error:
        print(error, file=sys.stderr)
        return 1
    if code == 0:
        page = FOLDER / "report.html"
        code = report_command.main([str(FOLDER), "--out", str(page)])
        print(f"\nOpen {page.resolve()} for plots and videos.")
        print("Try it yourself: `make serve` in one terminal, `make eval-libero` in another.")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
