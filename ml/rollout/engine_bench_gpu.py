"""Figures of the rollout engine on one GPU, with its log on: a random Llama of 1.24 B parameters, bf16.

Checks: trajectories are the same bit for bit in any company, replayed from graphs or not, and resumed from their log
or with their KV. What each part measured goes to stderr as it ends, so that a run that is cut off keeps its figures.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.testing import check, environment, figure
from ml.bench_models import LLAMA_1B, SMOLLM2_135M, random_model
from ml.model import Transformer
from ml.rollout.engine_bench import Run, random_requests, same
from ml.rollout.requests import Finished, Request
from ml.rollout.sizes_bench import sizes_figures
from ml.rollout.speculation_bench import tail_figures
from ml.rollout.spill import SpilledKv, decode_kv

LLAMA = LLAMA_1B | {"max_position_embeddings": 262144}
PROMPT, NEW = 128, 256
#: vLLM 0.24.0 on an H200, log-probabilities of the sampled tokens on, by requests.
_PEERS = {64: 12.8e3, 256: 27.2e3, 1024: 27.9e3}
_TARGETS = {64: 30e3, 256: 70e3, 1024: 90e3}


@functools.cache
def _llama() -> Transformer:
    return _chosen(random_model(LLAMA, "bf16", "cuda"))


def _chosen(model: Transformer) -> Transformer:
    """As a model that was loaded: its products are chosen."""
    model.check_row_invariance()
    return model


#: In their order; ml.bench offers the names.
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "decode": lambda: decode_figures(_llama(), 64) | decode_figures(_llama(), 256) | decode_figures(_llama(), 1024),
    "prefill": lambda: prefill_figures(_llama()),
    "staggered": lambda: staggered_figures(_llama()),
    "log": lambda: log_figures(_llama()),
    "mxfp4": lambda: mxfp4_figures(_llama()),
    "bits": lambda: bits_figures(_llama()),
    "resume": lambda: resume_figures(_llama(), 32768) | resume_figures(_llama(), 131072),
    "partitions": lambda: partition_figures(_llama()),
    "spill": lambda: spill_figures(_llama(), 64, 512) | spill_figures(_llama(), 1, 32768),
    "million": lambda: million_figures(),
    "sizes": sizes_figures,
    "speculation": lambda: tail_figures(_llama()),
}


def run(quick: bool, parts: Sequence[str] = ()) -> dict[str, Any]:
    """parts: names of PARTS; none stands for all. Raises CheckFailed when company, graphs or a resumption change a
    trajectory."""
    figures: dict[str, Any] = {}
    if quick:
        figures = decode_figures(_llama(), 64)
    else:
        chosen = parts or tuple(PARTS)
        for number, name in enumerate(chosen, 1):
            seconds, found = _timed(PARTS[name])
            figures |= found
            values = ", ".join(f"{key} {entry['value']:.4g} {entry['unit']}" for key, entry in found.items())
            print(f"{number}/{len(chosen)} {name}, {seconds:.0f} s: {values}", file=sys.stderr, flush=True)
    return {
        "figures": figures,
        "peers": {
            f"vLLM, {n} requests, measured apart": {"value": rate, "unit": "tokens/s", "version": "0.24.0"}
            for n, rate in _PEERS.items()
        },
        "env": environment(
            f"random Llama 1.24 B, bf16, prompt {PROMPT} + {NEW} new, log on; a million tokens: SmolLM2-135M's shape"
        ),
    }


def decode_figures(model: Transformer, count: int) -> dict[str, Any]:
    """Tokens a second of `count` requests, prefill included, and the time of a decode step."""
    requests = random_requests(model, count, PROMPT, NEW)
    with Run(model, count, PROMPT + NEW) as run:
        run.finish([replace(r, trajectory_id=f"warm {r.trajectory_id}") for r in requests])
        run.step_seconds.clear()
        started = time.perf_counter()
        finished = run.finish(requests)
        seconds = time.perf_counter() - started
        step_ms = statistics.median(run.step_seconds) * 1e3
    with Run(model, 1, PROMPT + NEW, graphs=False, steps_in_flight=0) as alone:
        check(same(finished["t1"], alone.finish(requests[1:2])["t1"]), f"company of {count} changes no bit")
    return {
        f"tokens_per_s_{count}": figure(count * NEW / seconds, "tokens/s", f">= {_TARGETS[count]:.0f}"),
        f"decode_step_ms_{count}": figure(step_ms, "ms", ""),
    }


def staggered_figures(model: Transformer, count: int = 1024, slots: int = 256) -> dict[str, Any]:
    """Tokens a second when responses of 1 to 768 tokens, 200 in the mean, end at any time and others take their
    places, four of a prompt."""
    r = random.Random(0)
    prompts = random_requests(model, count // 4, PROMPT, 1)
    requests = [
        Request(f"{i}.{n}", p.prompt_ids, 4 * i + n, min(768, 1 + int(r.expovariate(1 / 200))))
        for i, p in enumerate(prompts)
        for n in range(4)
    ]
    with Run(model, slots, PROMPT + 768) as run:
        run.finish([replace(request, trajectory_id=f"warm {request.trajectory_id}") for request in requests])
        started = time.perf_counter()
        finished = run.finish(requests)
        seconds = time.perf_counter() - started
    total = sum(len(f.response_ids) for f in finished.values())
    return {f"tokens_per_s_staggered_{slots}": figure(total / seconds, "tokens/s", "")}


class _NoLog:
    """Takes the place of the log where its cost is measured."""

    acknowledged = 0

    def admit(self, trajectory_id: str, *, prompt_digest: bytes, prompt_tokens: int) -> int:
        return 0

    def append_step(self, numbers: Any, first_token_indices: Any, ids: Any, raw: Any, sampled: Any) -> int:
        self.acknowledged += 1
        return self.acknowledged

    def append_finish(self, number: int, response_tokens: int, reason: str) -> int:
        self.acknowledged += 1
        return self.acknowledged

    def commit(self) -> None: ...
    def wait_local(self, sequence: int) -> None: ...


class _Tape(_NoLog):
    """Keeps what one trajectory sampled."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, float, float]] = []

    def append_step(self, numbers: Any, first_token_indices: Any, ids: Any, raw: Any, sampled: Any) -> int:
        self.tokens += zip(ids.tolist(), raw.tolist(), sampled.tolist(), strict=True)
        return super().append_step(numbers, first_token_indices, ids, raw, sampled)


def log_figures(model: Transformer, count: int = 64) -> dict[str, Any]:
    """What the log adds to a decode step, by turns with and without it."""
    with Run(model, count, PROMPT + NEW) as logged, Run(model, count, PROMPT + NEW) as plain:
        plain.engine.log = _NoLog()
        steps: dict[Run, list[float]] = {logged: [], plain: []}
        for turn in range(4):
            for one in steps:
                one.step_seconds.clear()
                one.finish(random_requests(model, count, PROMPT, NEW, prefix=f"{turn} "))
                if turn:
                    steps[one].append(statistics.median(one.step_seconds))
    overhead = statistics.median(a / b for a, b in zip(steps[logged], steps[plain], strict=True)) - 1
    return {"log_overhead_percent": figure(100 * overhead, "%", "<= 2")}


def prefill_figures(model: Transformer, count: int = 16, prompt: int = 32768) -> dict[str, Any]:
    """Tokens a second from the first step to the last prompt's first sampled token."""
    with Run(model, count, prompt + 1) as run:
        run.finish(random_requests(model, 1, 20000, 1, prefix="warm "))
        started = time.perf_counter()
        run.finish(random_requests(model, count, prompt, 1))
        seconds = time.perf_counter() - started
    return {f"prefill_tokens_per_s_{count}x{prompt}": figure(count * prompt / seconds, "tokens/s", ">= 100000")}


def bits_figures(model: Transformer) -> dict[str, Any]:
    """Resumptions in the middle, half of them with KV and half from the log, in batches of 1 to 256."""
    requests = random_requests(model, 256, PROMPT, 40)
    with Run(model, 256, PROMPT + 40) as run:
        whole = run.finish(requests)
    spills: dict[str, bytes] = {}
    with Run(model, 256, PROMPT + 40) as run:
        run.add(requests)
        while run.engine.live()["t0"] < 20:
            run.step()
        run.engine.spill(
            lambda name, parts: spills.update({name.removesuffix(".kv"): b"".join(parts)}) or True, math.inf
        )
        layout = run.engine.kv_layout
    compared = 0
    for count in (1, 2, 3, 15, 16, 17, 64, 100, 129, 256):
        resumed = []
        for index, request in enumerate(requests[:count]):
            part = _logged(request, whole[request.trajectory_id], 20)
            if index % 2 == count % 2:
                ids = [*part.prompt_ids, *part.logged_ids]
                kv = decode_kv(spills[part.trajectory_id], "", layout, part.trajectory_id, ids)
                part = replace(part, kv=kv)
            resumed.append(part)
        with Run(model, count, PROMPT + 40) as run:
            finished = run.finish(resumed)
        check(all(same(finished[i], whole[i]) for i in finished), f"{count} resumed trajectories equal whole ones")
        check(sum(f.interruptions.kv_restores for f in finished.values()) > 0 or count == 1, "KV was restored")
        compared += count
    return {"resumed_with_equal_bits": figure(compared, "trajectories", "")}


def _logged(request: Request, whole: Finished, count: int) -> Request:
    return replace(
        request, logged_ids=whole.response_ids[:count], logged_raw=whole.logprobs_raw[:count],
        logged_sampled=whole.logprobs_sampled[:count],
    )  # fmt: skip


def resume_figures(model: Transformer, prompt: int) -> dict[str, Any]:
    """Time to the next token of a trajectory with its KV in page-locked host memory, and from its log alone; time to
    write that KV as an object and to read it again."""
    (request,) = random_requests(model, 1, prompt, 16)
    objects: list[list[memoryview]] = []
    with Run(model, 1, prompt + 16) as run:
        whole = run.finish([request])["t0"]
    part = _logged(request, whole, 8)
    with Run(model, 1, prompt + 16) as run:
        run.add([request])
        while run.engine.live()["t0"] < 9:
            run.step()
        run.engine.kept_kv("t0")  # memory is page-locked once
        copy_s, kept = _timed(lambda: run.engine.kept_kv("t0"))
        kv = SpilledKv(kept.k_MLGC[: prompt + 7], kept.v_MLGC[: prompt + 7])
        write_s, _ = _timed(lambda: run.engine.spill(lambda name, parts: objects.append(parts) or True, math.inf))
        layout = run.engine.kv_layout
    ids = [*part.prompt_ids, *part.logged_ids]
    data = b"".join(objects[0])
    read_s, read = _timed(lambda: decode_kv(data, "", layout, "t0", ids))
    check(torch.equal(read.k_MLGC, kv.k_MLGC) and torch.equal(read.v_MLGC, kv.v_MLGC), "KV survives its object")
    by_kv = _seconds_to_next_token(model, replace(part, kv=kv), whole)
    by_prefill = _seconds_to_next_token(model, part, whole)
    gigabytes = (kv.k_MLGC.nbytes + kv.v_MLGC.nbytes) / 1e9
    return {
        f"resume_by_kv_ms_{prompt}": figure(by_kv * 1e3, "ms", ""),
        f"resume_by_prefill_ms_{prompt}": figure(by_prefill * 1e3, "ms", ""),
        f"kv_to_host_gb_per_s_{prompt}": figure(gigabytes / copy_s, "GB/s", ""),
        f"kv_object_write_s_{prompt}": figure(write_s, "s", ""),
        f"kv_object_read_s_{prompt}": figure(read_s, "s", ""),
    }


def spill_figures(model: Transformer, count: int, prompt: int) -> dict[str, Any]:
    """GB/s of a stop: KV of `count` trajectories from the device into synced files, for the first time and again."""
    with Run(model, count, prompt + 128) as run, tempfile.TemporaryDirectory(prefix="opd-bench-") as folder:
        run.add(random_requests(model, count, prompt, 16))
        while min(run.engine.live().values()) < 3:
            run.step()

        def write(name: str, parts: list[memoryview]) -> bool:
            with open(Path(folder) / name, "xb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            return True

        rates = []
        for _ in range(3):
            for path in Path(folder).iterdir():
                path.unlink()
            seconds, records = _timed(lambda: run.engine.spill(write, math.inf))
            rates.append(sum(record.size_bytes for record in records) / seconds / 1e9)
        check(len(records) == count, "every trajectory is spilled")
        for record in records:
            written = (Path(folder) / record.name).read_bytes()
            check(hashlib.sha256(written).hexdigest() == record.digest, "a spill has the digest of its record")
    return {
        f"spill_gb_per_s_first_{count}x{prompt}": figure(rates[0], "GB/s", ""),
        f"spill_gb_per_s_{count}x{prompt}": figure(rates[-1], "GB/s", ""),
    }


def partition_figures(model: Transformer, count: int = 256) -> dict[str, Any]:
    """Seconds of a partition of responses of 1 to 768 tokens on a new engine, and as the next one of that engine."""
    r = random.Random(0)
    requests = [
        replace(request, max_response_tokens=min(768, 1 + int(r.expovariate(1 / 200))))
        for request in random_requests(model, count, PROMPT, 1)
    ]
    with Run(model, count, PROMPT + 768) as run:
        run.finish(requests)  # kernels are compiled
    with Run(model, count, PROMPT + 768) as run:
        new_s, finished = _timed(lambda: run.finish(requests))
        run.engine.begin(_NoLog())
        next_s, again = _timed(lambda: run.finish(requests))
    check(all(same(finished[i], again[i]) for i in finished), "partitions before it change no trajectory")
    return {
        f"partition_s_new_engine_{count}": figure(new_s, "s", ""),
        f"partition_s_next_{count}": figure(next_s, "s", ""),
    }


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _seconds_to_next_token(model: Transformer, part: Request, whole: Finished) -> float:
    with Run(model, 1, len(part.prompt_ids) + part.max_response_tokens) as run:
        run.finish(random_requests(model, 1, len(part.prompt_ids) // 4, 4, prefix="warm "))
        started = time.perf_counter()
        run.add([part])
        while run.engine.live()[part.trajectory_id] == len(part.logged_ids):
            run.step()
        seconds = time.perf_counter() - started
        check(same(run.finish()[part.trajectory_id], whole), "a resumed trajectory equals the whole one")
    return seconds


def mxfp4_figures(bf16: Transformer) -> dict[str, Any]:
    """The same decode with MXFP4 weights in the linears, and with bf16 ones."""
    bf16_ms = decode_figures(bf16, 64)["decode_step_ms_64"]["value"]
    packed_ms = decode_figures(_chosen(random_model(LLAMA, "mxfp4", "cuda")), 64)["decode_step_ms_64"]["value"]
    return {
        "mxfp4_decode_step_ms_64": figure(packed_ms, "ms", ""),
        "mxfp4_speedup_64": figure(bf16_ms / packed_ms, "x", ">= 1"),
    }


def million_figures(tokens: int = 1 << 20, layers: int = 30) -> dict[str, Any]:
    """A context of `tokens`: prefilled, decoded, its KV taken to the host, resumed. SmolLM2-135M's shape."""
    sizes = {"max_position_embeddings": tokens, "num_hidden_layers": layers}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = _chosen(random_model({**SMOLLM2_135M, **sizes}, "bf16", "cuda"))
    (request,) = random_requests(model, 1, tokens - 64, 64)

    def until(run: Run, count: int) -> None:
        while run.engine.live()["t0"] < count:
            run.step()

    with Run(model, 1, tokens) as run:
        run.engine.log = tape = _Tape()
        run.add([request])
        prefill_s, _ = _timed(lambda: until(run, 1))
        _say("million", prefill_s=prefill_s)
        until(run, 8)
        decode_s, _ = _timed(lambda: until(run, 40))
        until(run, 60)
        peak = torch.cuda.max_memory_allocated() - before
        spill_s, kept = _timed(lambda: run.engine.kept_kv("t0"))
        _say("million", decode_ms=decode_s / 32 * 1e3, kv_to_host_s=spill_s)
    del run
    ids, raw, sampled = zip(*tape.tokens[:40], strict=True)
    kv = SpilledKv(kept.k_MLGC[: tokens - 64 + 39], kept.v_MLGC[: tokens - 64 + 39])
    part = replace(request, logged_ids=ids, logged_raw=raw, logged_sampled=sampled, kv=kv)
    with Run(model, 1, tokens) as run:
        run.add([part])
        resume_s, _ = _timed(lambda: until(run, 41))
        finished = run.finish()["t0"]
    resumed = [*zip(finished.response_ids, finished.logprobs_raw, finished.logprobs_sampled, strict=True)]
    check(len(resumed) == 64 and resumed[:60] == tape.tokens[:60], "a resumed context of a million tokens goes on")
    return {
        "million_prefill_s": figure(prefill_s, "s", ""),
        "million_decode_ms_a_token": figure(decode_s / 32 * 1e3, "ms", ""),
        "million_peak_gib": figure(peak / 2**30, "GiB", ""),
        "million_kv_gb": figure((kv.k_MLGC.nbytes + kv.v_MLGC.nbytes) / 1e9, "GB", ""),
        "million_kv_to_host_s": figure(spill_s, "s", ""),
        "million_resume_s": figure(resume_s, "s", ""),
    }


def _say(name: str, **values: float) -> None:
    """Tell stderr what a long part has measured so far."""
    print(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in values.items())}", file=sys.stderr, flush=True)
