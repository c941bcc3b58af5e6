"""How often the expert succeeds: `python -m scripts.check_expert libero_object --out FILE`."""

import sys

from deft_client.libero.commands.expert_check import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
