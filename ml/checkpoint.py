"""Hugging Face model folders: read with every tensor checked, written whole or not at all.

Stored dtypes are F32, BF16 or F16. What a folder's files are is ml.model_files' concern.

Letters: V vocabulary rows, E width of the model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ml.linear import COMPUTE_DTYPES, Compute, Linear, Precision, dense_precision, weight_values
from ml.model import ModelConfig, Transformer
from ml.model_files import CONFIG, EMBEDDING, HEAD, INDEX, WEIGHTS, read_config, tensor_files
from schemas.errors import FormatError, StoreError

SHARD_BYTES = 4 << 30
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    folder: Path, *, precision: Precision, compute: Compute, device: torch.device | str = "cpu", trainable: bool = False
) -> Transformer:
    """The model of a folder, its parameters as `Transformer` describes them.

    Raises ConfigError (no such folder, unsupported architecture) and FormatError (missing, unexpected or misshapen
    tensor, NaN or infinity, cut file), naming file and tensor.
    """
    folder = Path(folder)
    config = ModelConfig.from_hf(read_config(folder), str(folder / CONFIG))
    model = Transformer(
        config, precision=precision, compute=COMPUTE_DTYPES[compute], trainable=trainable, device=device
    )
    # The grid of a parameter is its module's: linears may be quantised, everything else is dense.
    dense = dense_precision(precision)
    grids: dict[str, Precision] = {
        f"{name}.weight": precision for name, module in model.named_modules() if isinstance(module, Linear)
    }
    wanted = dict(model.named_parameters())
    for name, tensor, where in _tensors(folder):
        parameter = wanted.pop(name, None)
        if parameter is None:
            _check_spare_tensor(folder, config, name, tensor, where)
            continue
        _check_tensor(tensor, tuple(parameter.shape), where)
        values = tensor.float() if trainable else weight_values(tensor.float(), grids.get(name, dense))
        with torch.no_grad():
            parameter.copy_(values)
    if wanted:
        name = next(iter(wanted))
        raise FormatError(str(folder), expected=f"tensor {name}", found=f"no such tensor ({len(wanted)} missing)")
    return model.train(trainable)


def read_head(folder: Path, *, precision: Precision = "bf16") -> torch.Tensor:
    """The unembedding matrix [V, E] alone, bf16, or fp32 for an fp32 model. Errors as above."""
    folder = Path(folder)
    config = ModelConfig.from_hf(read_config(folder), str(folder / CONFIG))
    name = EMBEDDING if config.tied else HEAD
    files = tensor_files(folder)
    if name not in files:
        raise FormatError(str(folder), expected=f"tensor {name}", found="no such tensor")
    for _, tensor, where in _tensors(folder, only=name):
        _check_tensor(tensor, (config.vocab_rows, config.width), where)
        return tensor.float() if precision == "fp32" else tensor.to(torch.bfloat16)
    raise FormatError(str(files[name]), expected=f"tensor {name}", found="no such tensor")


def save_model(
    folder: Path,
    config_json: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    companions: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers and `load_model` read; equal tensors give equal bytes.

    companions: a model folder whose other files (tokenizer, generation settings) are copied. Tensors are taken one at
    a time and written in shards of at most shard_bytes (a larger tensor has a shard of its own). The folder appears
    complete under its name, replacing one of that name. Raises StoreError when the disk refuses.
    """
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise StoreError(str(folder), expected="a folder that can be written", found=str(error)) from error
    try:
        if companions is not None:
            _copy_companions(Path(companions), partial)
        dtypes = _write_shards(partial, tensors, shard_bytes)
        config = {k: v for k, v in config_json.items() if k not in ("dtype", "torch_dtype")}
        if len(dtypes) == 1:
            config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
        (partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        _publish(partial, folder)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            str(folder), expected="a model folder written", found=str(error), safe="what was there before"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tensors(folder: Path, only: str | None = None) -> Iterator[tuple[str, torch.Tensor, str]]:
    """(name, tensor, where) in order of file, then name. Each tensor is a view of a mapped file."""
    files = tensor_files(folder)
    for path in sorted({files[only]} if only else set(files.values())):
        try:
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                for name in sorted({only} if only else names | {n for n, p in files.items() if p == path}):
                    if name not in names:
                        raise FormatError(str(path), expected=f"tensor {name}", found="no such tensor")
                    yield name, file.get_tensor(name), f"{path}, tensor {name}"
        except (SafetensorError, OSError) as error:
            raise FormatError(str(path), expected="a whole safetensors file", found=str(error)) from error


def _check_tensor(tensor: torch.Tensor, shape: tuple[int, ...], where: str) -> None:
    if tuple(tensor.shape) != shape:
        raise FormatError(where, expected=f"shape {shape}", found=f"{tuple(tensor.shape)}")
    if tensor.dtype not in _DTYPES:
        raise FormatError(where, expected="F32, BF16 or F16", found=str(tensor.dtype))
    if not torch.isfinite(tensor).all():
        raise FormatError(where, expected="finite numbers", found="NaN or infinity")


def _check_spare_tensor(folder: Path, config: ModelConfig, name: str, tensor: torch.Tensor, where: str) -> None:
    """Passes what writers are known to leave in a folder without effect; anything else is a FormatError."""
    if name.endswith("rotary_emb.inv_freq"):
        return
    if name == HEAD and config.tied:
        if torch.equal(tensor.to(torch.bfloat16), read_head(folder)):
            return
        raise FormatError(where, expected=f"{EMBEDDING}, as tie_word_embeddings says", found="other numbers")
    raise FormatError(where, expected=f"a tensor of {config.architecture}", found="an unexpected one")


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> set[torch.dtype]:
    """Writes the files and, for several, the index; gives the dtypes met."""
    shard: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    filled = total = 0
    dtypes: set[torch.dtype] = set()

    def flush() -> None:
        save_file(shard, folder / f"{len(shards)}.partial", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        tensor = tensor.detach().cpu().contiguous()
        if shard and filled + tensor.nbytes > shard_bytes:
            flush()
            filled = 0
        shard[name] = tensor
        filled, total = filled + tensor.nbytes, total + tensor.nbytes
        dtypes.add(tensor.dtype)
    flush()
    if len(shards) == 1:
        (folder / "0.partial").rename(folder / WEIGHTS)
        return dtypes
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.partial").rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return dtypes


def _copy_companions(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and path.name not in (CONFIG, INDEX):
            shutil.copyfile(path, target / path.name)


def _publish(partial: Path, folder: Path) -> None:
    """Make a finished folder durable, then give it its name."""
    partial.chmod(0o755)
    for path in (*partial.iterdir(), partial):
        _fsync(path)
    if folder.exists():
        replaced = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(replaced / folder.name)
        partial.rename(folder)
        shutil.rmtree(replaced)
    else:
        partial.rename(folder)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
