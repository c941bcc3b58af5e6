"""OpenVLA at full size against this GPU's limits: `python -m scripts.bench_gpu` (8 minutes)."""

import sys

from deft_policies.benchmark.limits import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
