"""Writes the stand-ins: one table in, a folder of MJCF and PNG files out."""

import hashlib
import json
import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

from deft_client.libero.errors import AssetsError
from deft_client.libero.standins.arenas import build_arenas
from deft_client.libero.standins.cabinet import build_cabinet
from deft_client.libero.standins.model import Asset, asset_xml, read_asset
from deft_client.libero.standins.textures import draw_textures, encode_png

MARKER = "deft_stand_ins.txt"


def generate() -> dict[str, bytes]:
    """Every file by its path; the marker holds a version that changes with what they say."""
    table = json.loads(files("deft_client.libero.standins").joinpath("table.json").read_text())
    assets = [read_asset(path, entry) for path, entry in table["objects"].items()]
    assets += [read_asset(path, entry) for path, entry in table["fixtures"].items()]
    assets += [build_cabinet(path, colours) for path, colours in table["cabinets"].items()]
    contacts = table["contact"]
    written = {_file_of(asset): asset_xml(asset, contacts[asset.contact]) for asset in assets}
    written |= build_arenas()
    pictures = draw_textures()
    # The bytes of a PNG file depend on the zlib at hand, so the version counts pixels.
    pixels = {path: picture.tobytes() for path, picture in pictures.items()}
    digest = hashlib.sha256()
    for path, content in sorted({**written, **pixels}.items()):
        digest.update(path.encode() + b"\0" + content)
    written |= {path: encode_png(picture) for path, picture in pictures.items()}
    written[MARKER] = digest.hexdigest()[:8].encode() + b"\n"
    return written


def build(folder: Path) -> None:
    """Write the stand-ins into a folder, which is made if missing."""
    try:
        for path, content in generate().items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    except OSError as error:
        raise AssetsError(f"cannot write the stand-ins to {folder}: {error}") from error


def build_in_cache(cache: Path) -> Path:
    """The cached stand-ins of this version, written first if they are missing or incomplete.

    Several workers may ask at once: each builds aside, and one rename wins.
    """
    content = generate()
    folder = cache / f"stand_ins_{content[MARKER].decode().strip()}"
    if all((folder / path).is_file() for path in content):
        return folder
    aside = Path(tempfile.mkdtemp(dir=cache, prefix="stand_ins_new_"))
    build(aside)
    try:
        if folder.exists():
            os.replace(folder, aside.with_name(aside.name + "_old"))
        os.replace(aside, folder)
    except OSError:
        if not all((folder / path).is_file() for path in content):
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(aside.with_name(aside.name + "_old"), ignore_errors=True)
    return folder


def _file_of(asset: Asset) -> str:
    folder, name = asset.path.rsplit("/", 1)
    single = folder == "articulated_objects"
    return f"{asset.path}.xml" if single else f"{asset.path}/{name}.xml"
