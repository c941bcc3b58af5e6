"""`python -m tests.black_box.record [NAME ...]`: write what the product does today as recordings.

Whoever changes behaviour on purpose does so in the same commit and says it in CHANGES.md.
"""

import sys

from tests.black_box.recordings import FOLDER, RECORDINGS, recorded_text, stored_names


def main(names: list[str]) -> int:
    chosen = names or list(RECORDINGS)
    for name in chosen:
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recorded_text(RECORDINGS[name]()))
        sys.stdout.write(f"{name}\n")
    for name in sorted(stored_names() - set(RECORDINGS)):
        (FOLDER / name).unlink()
        sys.stdout.write(f"removed {name}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
