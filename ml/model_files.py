"""The files of a Hugging Face model folder, without torch: configuration, where each tensor lies, digest.

A folder has config.json and either model.safetensors or shards with model.safetensors.index.json. A model's digest
covers its tensors (names, dtypes, shapes, bytes), not how they are split in files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, FormatError
from schemas.keys import canonical_json
from schemas.shards import TensorSpec, decode_header

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: quantization_config of a folder whose linears are stored as NAME.blocks and NAME.scales. transformers does not know
#: the method: it warns, and lists every linear's weight as missing.
MXFP4_STORED = {"quant_method": "opd_mxfp4"}
#: Columns that share one scale.
MXFP4_COLUMNS = 32
#: A product in FP8 takes whole multiples of rows.
FP8_ROWS = 16
_READ_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100_000_000


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError when the file is missing, FormatError when it is something else."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(str(path), expected="a Hugging Face model folder", found="no such file") from None
    except OSError as error:
        raise ConfigError(str(path), expected="a readable file", found=str(error)) from error
    except ValueError as error:
        raise FormatError(str(path), expected="JSON", found=str(error)) from error
    if not isinstance(value, dict):
        raise FormatError(str(path), expected="a JSON object", found=type(value).__name__)
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Contents of config.json. Raises ConfigError when the folder or the file is missing, FormatError for bad JSON."""
    return read_json(Path(folder) / CONFIG)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> its file.

    Raises ConfigError when the folder has no weights, FormatError for an index or a file that cannot be read.
    """
    if (folder / WEIGHTS).exists():
        return dict.fromkeys(file_header(folder / WEIGHTS), folder / WEIGHTS)
    if not (folder / INDEX).exists():
        raise ConfigError(str(folder), expected=f"{WEIGHTS} or {INDEX}", found="neither")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(str(folder / INDEX), expected="a weight_map", found=repr(weight_map)[:100])
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise FormatError(f"{folder / INDEX}, {name}", expected="a file of this folder", found=repr(file)[:100])
    return {name: folder / file for name, file in weight_map.items()}


def file_header(path: Path) -> dict[str, TensorSpec]:
    """Where each tensor of one safetensors file lies. Raises FormatError, for a cut file too."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
            specs = decode_header(file.read(8 + min(length, _MAX_HEADER_BYTES + 1)), str(path))
            size = file.seek(0, 2)
    except OSError as error:
        raise FormatError(str(path), expected="a safetensors file", found=str(error)) from error
    needed = max((spec.start + spec.length for spec in specs.values()), default=0)
    if size < needed:
        raise FormatError(str(path), expected=f"{needed} bytes", found=f"{size}")
    return specs


def model_digest(folder: Path) -> str:
    """SHA-256 over (name, dtype, shape, bytes) of every tensor in order of name; reads each file once, in pieces."""
    folder = Path(folder)
    sha = hashlib.sha256()
    specs: dict[Path, dict[str, TensorSpec]] = {}
    for name, path in sorted(tensor_files(folder).items()):
        if path not in specs:
            specs[path] = file_header(path)
        spec = specs[path].get(name)
        if spec is None:
            raise FormatError(str(path), expected=f"tensor {name}", found="no such tensor")
        sha.update(canonical_json([name, spec.dtype, list(spec.shape)]))
        with path.open("rb") as file:
            file.seek(spec.start)
            left = spec.length
            while left:
                piece = file.read(min(left, _READ_BYTES))
                if not piece:
                    raise FormatError(f"{path}, tensor {name}", expected=f"{left} more bytes", found="end of file")
                sha.update(piece)
                left -= len(piece)
    return sha.hexdigest()
