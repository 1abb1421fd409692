"""Hugging Face model folders: read with every tensor checked, written whole or not at all.

Stored dtypes are F32, BF16 or F16, or for the linears of an MXFP4 folder (`export_mxfp4`) U8 pairs NAME.blocks
[N, K/2] and NAME.scales [N, K/32], NAME being the weight's Hugging Face name. What a folder's files are is
ml.model_files' concern.

Letters: V vocabulary rows, E width of the model, N outputs and K inputs of a linear.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kernels.quant import mxfp4_dequantize, mxfp4_quantize
from ml.device import traits
from ml.linear import COMPUTE_DTYPES, Compute, Linear, Precision, dense_precision, fp8_values, weight_values
from ml.model import ModelConfig, Transformer
from ml.model_files import (
    CONFIG,
    EMBEDDING,
    FP8_ROWS,
    HASH_THREADS,
    HEAD,
    INDEX,
    MXFP4_COLUMNS,
    MXFP4_STORED,
    WEIGHTS,
    ModelDigests,
    StoredTensor,
    check_digest,
    head_name,
    read_config,
    settings_of,
    stored_tensors,
    tensor_digest,
    weights_of,
)
from ml.tensor_parallel import ALONE, Group
from ml.whole_folder import whole_folder
from schemas.errors import ConfigError, FormatError

SHARD_BYTES = 4 << 30
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: (name, tensor, where it lies)
Named = tuple[str, torch.Tensor, str]


def load_model(
    folder: Path, *, precision: Precision, compute: Compute, device: torch.device | str = "cpu",
    trainable: bool = False, group: Group = ALONE, digest: str | None = None,
) -> Transformer:  # fmt: skip
    """The model of a folder, its parameters as `Transformer` describes them; of a group, this rank's part.

    digest: the `model_digest` that the folder must have, of the very bytes that are loaded; None takes any.

    For inference, products of the model's shapes are proved row-invariant on the device first. Raises ConfigError (no
    such folder, unsupported architecture, a linear that MXFP4 cannot hold or FP8 not multiply, an MXFP4 folder asked
    for other values, a dtype that the device's kernels do not compute in, FP8 for anything but an MXFP4 student) and
    FormatError (missing, unexpected or misshapen tensor, NaN or infinity, cut file), naming file and tensor.
    """
    folder = Path(folder)
    config_json = read_config(folder)
    config = ModelConfig.from_hf(config_json, str(folder / CONFIG))
    packed = "quantization_config" in config_json
    if packed and (trainable or precision != "mxfp4"):
        raise ConfigError(
            str(folder), expected="float weights to train on" if trainable else f"weights for precision {precision}",
            found="MXFP4 weights", next_command="use the folder that it was made from",
        )  # fmt: skip
    if COMPUTE_DTYPES[compute] not in traits(device).compute_dtypes:
        raise ConfigError(
            str(folder), expected=f"products in bf16 on {device}", found=compute,
            next_command='precision = "bf16" or "mxfp4", and train.compute = "bf16"',
        )  # fmt: skip
    if compute == "fp8" and not (trainable and precision == "mxfp4"):
        raise ConfigError(
            str(folder), expected="an MXFP4 student, to train in FP8", found=f"precision {precision}",
            next_command='precision = "mxfp4", or train.compute = "bf16"',
        )  # fmt: skip
    model = Transformer(
        config, precision=precision, compute=COMPUTE_DTYPES[compute], trainable=trainable, fp8=compute == "fp8",
        device=device, group=group,
    )  # fmt: skip
    if not trainable:
        model.check_row_invariance()
    linears, parameters = _linears(model), dict(model.named_parameters())
    hashes: dict[str, str] | None = None if digest is None else {}
    for name, tensor, where in _model_tensors(folder, model, hashes):
        if name in linears and precision == "mxfp4":
            _check_columns(tensor, where)
        if name in linears and compute == "fp8":
            _check_rows(tensor, where)
        values = tensor.to(device).float()
        if name not in linears:
            with torch.no_grad():
                parameters[name].copy_(values if trainable else weight_values(values, dense_precision(precision)))
            continue
        # Codes that were stored are not made anew, and a layer that packs makes its own.
        taken = trainable or packed or linears[name].packs
        linears[name].set_weight(values if taken else weight_values(values, precision))
    if digest is not None and hashes is not None:
        found = ModelDigests(weights_of(hashes), settings_of(folder, config_json))
        check_digest(folder, digest, found.model, "model")
    return model.train(trainable)


def read_head(folder: Path, *, precision: Precision = "bf16", digest: str | None = None) -> torch.Tensor:
    """The unembedding matrix [V, E] of a supported architecture alone, bf16, or fp32 for an fp32 model.

    digest: the head's own of `model_digests`; None takes any. Errors as above.
    """
    folder = Path(folder)
    config_json = read_config(folder)
    config = ModelConfig.from_hf(config_json, str(folder / CONFIG))
    tensor, where, found = read_tensor(folder, head_name(config_json), hashed=digest is not None)
    if digest is not None:
        check_digest(folder, digest, found, "head")
    check_tensor(tensor, (config.vocab_rows, config.width), where)
    return tensor.float() if precision == "fp32" else tensor.to(torch.bfloat16)


def read_tensor(folder: Path, name: str, *, hashed: bool) -> tuple[torch.Tensor, str, str]:
    """(one tensor of any model folder as it is stored, where it lies, its `tensor_digest` or "" unless hashed).

    For `check_tensor` to check. Raises ConfigError (no folder, no safetensors), FormatError (no such tensor, cut file).
    """
    if name not in stored_tensors(folder):
        raise FormatError(str(folder), expected=f"tensor {name}", found="no such tensor")
    hashes: dict[str, str] | None = {} if hashed else None
    ((_, tensor, where),) = _tensors(folder, hashes, only=name)
    return tensor, where, hashes[name] if hashes else ""


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
    with whole_folder(Path(folder), what="a model folder", safe="what was there before") as partial:
        if companions is not None:
            _copy_companions(Path(companions), partial)
        dtypes = _write_shards(partial, tensors, shard_bytes)
        config = {k: v for k, v in config_json.items() if k not in ("dtype", "torch_dtype")}
        if len(dtypes) == 1:
            config["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
        (partial / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def export_mxfp4(folder: Path, source: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model of `source` with its linears in MXFP4 and everything else in bf16: a quarter of bf16's bytes.

    `load_model` with precision "mxfp4" gives the same bits from either folder; transformers cannot read this one.
    Raises as load_model and save_model do.
    """
    source = Path(source)
    config_json = read_config(source)
    save_model(
        folder, config_json | {"quantization_config": MXFP4_STORED}, _mxfp4_tensors(source), companions=source,
        shard_bytes=shard_bytes,
    )  # fmt: skip


def export_bf16(folder: Path, source: Path, precision: Precision, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model of `source` in bf16, each linear with the values that an engine of `precision` computes with.

    Every MXFP4 value is a bf16 value, so transformers samples from the same weights as the rollout of an MXFP4
    student does. Raises as load_model and save_model do.
    """
    tensors = (
        (name, weight_values(tensor.float(), precision if is_linear else "bf16", torch.bfloat16))
        for name, tensor, _, is_linear in _outline_tensors(Path(source))
    )
    save_model(folder, read_config(Path(source)), tensors, companions=Path(source), shard_bytes=shard_bytes)


def fp8_exact(folder: Path) -> dict[str, bool]:
    """Weight name of each linear -> whether FP8 E4M3 in tiles of 128 x 128 holds its MXFP4 values, all of them.

    A linear that is not exact must not be computed in FP8: trainer and sampler would see different weights. Raises as
    load_model does.
    """
    exact = {}
    for name, tensor, where, is_linear in _outline_tensors(Path(folder)):
        if is_linear:
            _check_columns(tensor, where)
            exact[name] = _fp8_holds(tensor.float())
    return exact


def _fp8_holds(w_OI: torch.Tensor) -> bool:
    # Blocks' largest values within 14 binades have scales within 15, from the largest's to 2^-14 of it: FP8 holds such
    # tiles. Nearly every matrix is settled so, in a tenth of the time that codes and their decoding take on a CPU.
    largest = w_OI.reshape(-1, MXFP4_COLUMNS).abs().amax(1)
    exponents = torch.frexp(largest[largest > 0])[1]
    if len(exponents) == 0 or int(exponents.max() - exponents.min()) <= 13:
        return True
    return bool(fp8_values(w_OI)[2].all())


def _mxfp4_tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor, where, is_linear in _outline_tensors(source):
        if not is_linear:
            yield name, tensor.to(torch.bfloat16)
            continue
        _check_columns(tensor, where)
        blocks, scales = mxfp4_quantize(tensor.float())
        yield f"{name}.blocks", blocks
        yield f"{name}.scales", scales


def _outline_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor, str, bool]]:
    """(name, tensor, where, whether it is a linear's weight), checked without memory for a second copy."""
    config = ModelConfig.from_hf(read_config(folder), str(folder / CONFIG))
    model = Transformer(config, precision="fp32", compute=torch.float32, trainable=False, device="meta")
    linears = _linears(model)
    for name, tensor, where in _model_tensors(folder, model):
        yield name, tensor, where, name in linears


def _linears(model: Transformer) -> dict[str, Linear]:
    """Weight name -> its module."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Linear)}


def _model_tensors(folder: Path, model: Transformer, hashes: dict[str, str] | None = None) -> Iterator[Named]:
    """Each of the model's parameters, checked, this rank's rows where ranks share them; FormatError for one too many
    or too few. hashes: as of `_tensors`."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    split = {
        f"{owner}.{name}": module for owner, module in model.named_modules() if isinstance(module, Linear)
        for name, _ in module.named_parameters()
    }  # fmt: skip
    shapes |= {name: (module.num_outputs, *shapes[name][1:]) for name, module in split.items()}
    tensors = _tensors(folder, hashes)
    if "quantization_config" in read_config(folder):
        tensors = _unpacked(folder, tensors)
    for name, tensor, where in tensors:
        shape = shapes.pop(name, None)
        if shape is None:
            _check_spare_tensor(folder, model.config, name, tensor, where)
            continue
        check_tensor(tensor, shape, where)
        yield name, model.group.part(tensor) if name in split else tensor, where
    if shapes:
        name = next(iter(shapes))
        raise FormatError(str(folder), expected=f"tensor {name}", found=f"no such tensor ({len(shapes)} missing)")


def _unpacked(folder: Path, tensors: Iterable[Named]) -> Iterator[Named]:
    """The same with each pair NAME.blocks, NAME.scales as NAME in bf16, which holds every MXFP4 value."""
    waiting: dict[str, tuple[str, torch.Tensor]] = {}
    for name, tensor, where in tensors:
        owner, _, part = name.rpartition(".")
        if part not in ("blocks", "scales"):
            yield name, tensor, where
            continue
        if tensor.dtype != torch.uint8 or tensor.dim() != 2:
            raise FormatError(where, expected="a U8 matrix", found=f"{tensor.dtype} {list(tensor.shape)}")
        if owner not in waiting:
            waiting[owner] = part, tensor
            continue
        pair = dict([waiting.pop(owner), (part, tensor)])
        rows, half_columns = pair["blocks"].shape
        columns = 2 * half_columns
        if columns % MXFP4_COLUMNS or pair["scales"].shape != (rows, columns // MXFP4_COLUMNS):
            raise FormatError(
                where, expected=f"a scale for each {MXFP4_COLUMNS} of {rows} x {columns} codes",
                found=f"{list(pair['scales'].shape)}",
            )  # fmt: skip
        yield owner, mxfp4_dequantize(pair["blocks"], pair["scales"]), where
    if waiting:
        owner, (part, _) = next(iter(waiting.items()))
        raise FormatError(f"{folder}, tensor {owner}", expected="blocks and scales", found=f"{part} only")


def _tensors(folder: Path, hashes: dict[str, str] | None = None, only: str | None = None) -> Iterator[Named]:
    """In order of file, then name. Each tensor is a view of a mapped file; given `hashes`, it is a copy, whose
    `tensor_digest` is put there."""
    tensors = stored_tensors(folder)
    wanted = [only] if only else list(tensors)
    for path in sorted({tensors[name].path for name in wanted}):
        names = [name for name in wanted if tensors[name].path == path]
        try:
            with safe_open(path, framework="pt") as file:
                views = ((name, file.get_tensor(name), f"{path}, tensor {name}") for name in names)
                yield from views if hashes is None else _hashed(views, tensors, hashes)
        except (SafetensorError, OSError) as error:
            raise FormatError(str(path), expected="a whole safetensors file", found=str(error)) from error


def _hashed(views: Iterable[Named], tensors: Mapping[str, StoredTensor], hashes: dict[str, str]) -> Iterator[Named]:
    """Copies of the tensors, hashed a few ahead on threads: what a file holds later does not matter."""

    def copied(name: str, view: torch.Tensor, where: str) -> tuple[Named, str]:
        tensor = view.clone()
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        return (name, tensor, where), tensor_digest(name, tensors[name].spec.dtype, tensor.shape, [data])

    def taken(future: Future[tuple[Named, str]]) -> Named:
        named, hashes[named[0]] = future.result()
        return named

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        waiting: deque[Future[tuple[Named, str]]] = deque()
        for view in views:
            waiting.append(pool.submit(copied, *view))
            if len(waiting) > HASH_THREADS:
                yield taken(waiting.popleft())
        while waiting:
            yield taken(waiting.popleft())


def check_tensor(tensor: torch.Tensor, shape: tuple[int, ...], where: str) -> None:
    """Raises FormatError for another shape, no float dtype, NaN or infinity."""
    if tuple(tensor.shape) != shape:
        raise FormatError(where, expected=f"shape {shape}", found=f"{tuple(tensor.shape)}")
    if tensor.dtype not in _DTYPES:
        raise FormatError(where, expected="F32, BF16 or F16", found=str(tensor.dtype))
    if not torch.isfinite(tensor).all():
        raise FormatError(where, expected="finite numbers", found="NaN or infinity")


def _check_columns(tensor: torch.Tensor, where: str) -> None:
    if tensor.shape[1] % MXFP4_COLUMNS:
        raise ConfigError(
            where, expected=f"a multiple of {MXFP4_COLUMNS} columns, for MXFP4", found=f"{tensor.shape[1]}",
            next_command='precision = "bf16" for this model',
        )  # fmt: skip


def _check_rows(tensor: torch.Tensor, where: str) -> None:
    if tensor.shape[0] % FP8_ROWS:
        raise ConfigError(
            where, expected=f"a multiple of {FP8_ROWS} rows, for products in FP8", found=f"{tensor.shape[0]}",
            next_command='train.compute = "bf16" for this model',
        )  # fmt: skip


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
