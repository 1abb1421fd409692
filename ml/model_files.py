"""The files of a Hugging Face model folder, without torch: configuration, where each tensor lies, digests.

A folder has config.json and either model.safetensors or shards with model.safetensors.index.json. A model's digest
covers its weights (names, dtypes, shapes, bytes; not how they are split in files) and its settings: all else in the
folder that changes what the model computes, where it stops or how its prompts are written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, ContractError, FormatError
from schemas.keys import canonical_json, digest, digest_bytes
from schemas.shards import TensorSpec, decode_header

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: Files from which prompts are written, as they stand.
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
#: quantization_config of a folder whose linears are stored as NAME.blocks and NAME.scales. transformers does not know
#: the method: it warns, and lists every linear's weight as missing.
MXFP4_STORED = {"quant_method": "opd_mxfp4"}
#: Columns that share one scale.
MXFP4_COLUMNS = 32
#: A product in FP8 takes whole multiples of rows.
FP8_ROWS = 16
#: Tensors that are hashed at once. SHA-256 takes 0.3 to 2 GB/s a core.
HASH_THREADS = min(8, os.cpu_count() or 1)
#: Of config.json, what says nothing about the model: who wrote it, and in which dtype it is stored.
_NO_SETTINGS = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
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


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, and what it is."""

    path: Path
    spec: TensorSpec


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Name -> where it lies, of every tensor of a folder, by name: the one reader of the index.

    Raises ConfigError when the folder has no weights, FormatError for an index or a file that cannot be read, and
    where index and files disagree: readers that go by one of them would have other tensors than we do.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).exists():
        specs = file_header(folder / WEIGHTS)
        return {name: StoredTensor(folder / WEIGHTS, specs[name]) for name in sorted(specs)}
    weight_map = _read_index(folder)
    specs = {file: file_header(folder / file) for file in sorted(set(weight_map.values()))}
    for file, stored in specs.items():
        for name in stored:
            if name not in weight_map:
                raise FormatError(
                    f"{folder / file}, tensor {name}", expected=f"its name in {INDEX}", found="none there"
                )
            if weight_map[name] != file:
                raise FormatError(
                    f"{folder / file}, tensor {name}", expected=f"it in {weight_map[name]} only, as {INDEX} says",
                    found="a copy here too", next_command="remove the stale copy, or write the model anew",
                )  # fmt: skip
    for name, file in weight_map.items():
        if name not in specs[file]:
            raise FormatError(str(folder / file), expected=f"tensor {name}", found="no such tensor")
    return {name: StoredTensor(folder / file, specs[file][name]) for name, file in sorted(weight_map.items())}


def _read_index(folder: Path) -> dict[str, str]:
    if not (folder / INDEX).exists():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        raise ConfigError(
            str(folder), expected=f"{WEIGHTS} or {INDEX}", found=f"{pickles[0]}, a pickle" if pickles else "neither",
            next_command="save the model again with save_pretrained, which writes safetensors",
        )  # fmt: skip
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(str(folder / INDEX), expected="a weight_map", found=repr(weight_map)[:100])
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise FormatError(f"{folder / INDEX}, {name}", expected="a file of this folder", found=repr(file)[:100])
    return weight_map


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


def linear_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Weight name and [rows, columns] of each linear of a supported architecture, by headers."""
    for name, tensor in stored_tensors(folder).items():
        if name.startswith("model.layers.") and len(tensor.spec.shape) == 2:
            yield name, tensor.spec.shape


@dataclass(frozen=True)
class ModelDigests:
    """SHA-256, in hexadecimal, of a model folder's parts. head: of the unembedding matrix alone, None without one."""

    weights: str
    settings: str
    head: str | None = None

    @property
    def model(self) -> str:
        """The identity of the model: of weights and settings together."""
        return digest({"weights": self.weights, "settings": self.settings})


def model_digests(folder: Path) -> ModelDigests:
    """Digests of everything that changes what a model computes or reads; each tensor is read once, in pieces.

    Raises ConfigError and FormatError as `stored_tensors` and `read_config` do.
    """
    folder = Path(folder)
    config = read_config(folder)
    hashes = tensor_digests(folder)
    return ModelDigests(weights_of(hashes), settings_of(folder, config), hashes.get(head_name(config)))


def tensor_digests(folder: Path) -> dict[str, str]:
    """Name -> `tensor_digest` of every tensor of a folder. Raises as `stored_tensors`."""
    tensors = stored_tensors(folder)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(tensors, pool.map(_stored_tensor_digest, tensors, tensors.values()), strict=True))


def model_digest(folder: Path) -> str:
    """The identity of a model: weights and settings. Raises as `model_digests`."""
    return model_digests(folder).model


def weights_digest(folder: Path) -> str:
    """Of the tensors alone. Raises as `model_digests`."""
    return model_digests(folder).weights


def settings_digest(folder: Path) -> str:
    """Of all but the tensors. Raises ConfigError for a file that cannot be read, FormatError for bad JSON."""
    return settings_of(Path(folder), read_config(folder))


def head_name(config: Mapping[str, Any]) -> str:
    """Name of the unembedding matrix of a model with this config.json."""
    return EMBEDDING if config.get("tie_word_embeddings") else HEAD


def tensor_digest(name: str, dtype: str, shape: Iterable[int], pieces: Iterable[bytes | memoryview]) -> str:
    """Of one tensor; dtype: safetensors name; pieces: its bytes, row-major."""
    sha = hashlib.sha256(canonical_json([name, dtype, list(shape)]))
    for piece in pieces:
        sha.update(piece)
    return sha.hexdigest()


def weights_of(hashes: Mapping[str, str]) -> str:
    """The digest of all tensors: name -> `tensor_digest`."""
    return digest(dict(hashes))


def settings_of(folder: Path, config: Mapping[str, Any]) -> str:
    """`settings_digest` of a folder whose config.json was read already."""
    parts = {CONFIG: {name: value for name, value in config.items() if name not in _NO_SETTINGS}}
    return digest_of_parts(folder, parts | companions_of(folder))


def companions_of(folder: Path) -> dict[str, Any]:
    """What the settings of a model hold beside config.json: stop ids, and digests of tokenizer and chat template."""
    generation = read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    return {
        GENERATION: generation.get("eos_token_id"),
        **{name: digest_bytes(_file_bytes(folder / name)) for name in TEXT_FILES if (folder / name).exists()},
    }


def digest_of_parts(folder: Path, parts: Mapping[str, Any]) -> str:
    """Raises FormatError, naming config.json, for numbers that are not finite."""
    try:
        return digest(parts)
    except ValueError as error:
        raise FormatError(str(folder / CONFIG), expected="finite numbers", found=str(error)) from error


def check_digest(folder: Path, wanted: str, found: str, what: str) -> None:
    """Raises ContractError unless the digest of what was read is the wanted one; what: "model" or "head"."""
    if found != wanted:
        newest = max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_mtime)
        changed = datetime.fromtimestamp(newest.stat().st_mtime, UTC).isoformat(sep=" ", timespec="seconds")
        raise ContractError(
            str(folder), expected=f"the {what} of digest {wanted}",
            found=f"{found}; the newest file is {newest.name}, of {changed}",
            safe="what was made with the folder as it was",
            next_command="put the folder back as it was, or give the other model a folder of its own",
        )  # fmt: skip


def _stored_tensor_digest(name: str, tensor: StoredTensor) -> str:
    return tensor_digest(name, tensor.spec.dtype, tensor.spec.shape, _pieces(name, tensor.path, tensor.spec))


def _pieces(name: str, path: Path, spec: TensorSpec) -> Iterable[bytes]:
    with path.open("rb") as file:
        file.seek(spec.start)
        left = spec.length
        while left:
            piece = file.read(min(left, _READ_BYTES))
            if not piece:
                raise FormatError(f"{path}, tensor {name}", expected=f"{left} more bytes", found="end of file")
            yield piece
            left -= len(piece)


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), expected="a readable file", found=str(error)) from error
