"""The rank processes of rollout, teach and train on a GPU, over shards and a plan that they made on the CPU:

    python -m tests.device_loop FOLDER [--shape NAME] [--prompts N] [--new N] [--ranks N]

Rollout and teach run on the CPU first. Then teach and train run from those shards on both kinds of device, in bf16,
and on the CPU in fp32, the oracle: hidden states and first gradients of the GPU may be no further from it than FACTOR
times as far as the CPU's bf16 results are. Log-probabilities that the CPU's sampler logged are recomputed by the GPU's
trainer. At last the GPU makes an iteration of its own, where they must agree to the rounding of a sum. With --ranks N,
ZeRO-3 on N GPUs must equal ZeRO-1 on one. Prints a table, tokens a second and peak memory of each stage; exit status 1
when a check fails. Weights are random, of the named shape (tests.support.random_models).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from infra import leases
from infra.launch import free_port
from infra.stores import open_store
from kernels.testing import relative_error
from ml.model_files import model_digest
from schemas import keys
from schemas.config import Train
from schemas.typed_json import to_json
from tasks.stages.train import train_settings
from tests.support.random_models import SHAPES, random_model
from tests.support.tiny import tiny_model
from tests.support.train_site import own_head

FACTOR = 1.5
THREADS = 4
#: Of a logged and a recomputed log-probability, in nats, between a CPU and a GPU in bf16.
MEAN_MISMATCH = 0.05
#: On one device: two orders of one sum over the vocabulary.
SAME_DEVICE_MISMATCH = 1e-4
#: Gradients of two numbers of ranks, which sum in another order.
RANKS_ERROR = 0.02


class Loop:
    """One folder of work. Each stage's result is named; stats: name -> the last partition's."""

    def __init__(self, folder: Path, shape: str, prompts: int, new_tokens: int) -> None:
        self.folder, self.prompts, self.new_tokens = folder, prompts, new_tokens
        self.root = folder / "data"
        self.store = open_store(str(self.root))
        self.vocab_size = SHAPES[shape]["vocab_size"]
        tokenizer = tiny_model(folder / "tokenizer")
        self.student = random_model(folder / "student", shape, seed=1, companions=tokenizer)
        teacher = {"small": "small-teacher"}.get(shape, "smollm2-360m")
        self.teachers = [
            random_model(folder / "teacher-0", teacher, seed=2, num_hidden_layers=8, vocab_size=self.vocab_size),
            random_model(folder / "teacher-1", shape, seed=3),
        ]
        self.stats: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []

    def check(self, what: str, value: float, bound: float) -> None:
        """`value` may be at most `bound`."""
        holds = value <= bound
        print(f"{'ok  ' if holds else 'FAIL'} {what}: {value:.3g} (at most {bound:.3g})", flush=True)
        if not holds:
            self.failed.append(what)

    def start(self, stage: str, name: str, work: dict[str, Any], *, cuda: bool, ranks: int = 1) -> list[Any]:
        """Rank processes of one stage; `wait` for them."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(work))
        port = str(free_port())
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        group |= {"OMP_NUM_THREADS": str(work["threads"]), "OMP_WAIT_POLICY": "PASSIVE"}
        hidden = {} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
        return [name, [
            subprocess.Popen(
                [sys.executable, "-m", f"tasks.ranks.{stage}", str(path)],
                env=os.environ | group | hidden | {"RANK": str(r), "LOCAL_RANK": str(r)},
                stdout=subprocess.DEVNULL, stderr=open(self.folder / f"{name}-{r}.err", "wb"),
            )
            for r in range(ranks)
        ], time.monotonic()]  # fmt: skip

    def wait(self, *started: list[Any]) -> None:
        for name, processes, since in started:
            statuses = [p.wait() for p in processes]
            print(f"     {name}: {time.monotonic() - since:.1f} s with its start", flush=True)
            if any(statuses):
                for r in range(len(processes)):
                    print((self.folder / f"{name}-{r}.err").read_text()[-3000:])
                raise RuntimeError(f"{name} ended with {statuses}")

    def manifest(self, owned: str) -> dict[str, Any]:
        found = leases.finished(self.store, owned)
        assert found is not None, owned
        return found.manifest

    # --- stages

    def model(self, folder: Path, precision: str, compute: str) -> dict[str, str]:
        return {"folder": str(folder), "digest": model_digest(folder), "precision": precision, "compute": compute}

    def rollout_work(self, name: str, precision: str) -> dict[str, Any]:
        rng = np.random.default_rng(5)
        partitions = []
        for partition in (0, 1):
            requests = []
            for i in range(self.prompts):
                trajectory_id = keys.trajectory_id(name, 0, f"prompt{partition}-{i}", 0)
                prompt = [1, *rng.integers(3, self.vocab_size, int(rng.integers(10, 90))).tolist()]
                requests.append({
                    "trajectory_id": trajectory_id, "prompt_id": f"prompt{partition}-{i}", "sample_index": 0,
                    "split": "train", "prompt_ids": prompt, "max_response_tokens": self.new_tokens,
                    "sampling_key": keys.sampling_key(5, trajectory_id),
                    "prompt": {"prompt_id": f"prompt{partition}-{i}", "verifier": None},
                })  # fmt: skip
            partitions.append({"partition": partition, "requests": requests})
        return {
            "root": str(self.root), "run_id": name, "iteration": 0,
            "stage_prefix": f"runs/{name}/00000/rollout/f", "run_epoch": 1, "scoring": {},
            "student": self.model(self.student, precision, "bf16"),
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, "stop_ids": [2],
            "vocab_size": self.vocab_size, "threads": THREADS, "scratch": str(self.folder / f"{name}-scratch"),
            "engine": {"max_sequences": 64, "page_tokens": 64, "kv_bytes": 1 << 30}, "ranks": 1,
            "seal_seconds": 2.0, "grace_seconds": 20.0, "dead_after_seconds": 60.0,
            "verifier": {"timeout_seconds": 30.0, "memory_bytes": 4 << 30}, "max_verifier_failures": 0,
            "partitions": partitions,
        }  # fmt: skip

    def rollout_rows(self, name: str) -> list[dict[str, Any]]:
        prefix = f"runs/{name}/00000/rollout/f"
        manifests = [self.manifest(keys.partition_prefix(prefix, p)) for p in (0, 1)]
        self.stats[f"rollout {name}"] = manifests[1]["stats"]
        return [json.loads(line) for m in manifests for line in self.store.get(m["rows_key"]).splitlines()]

    def teach_work(self, name: str, rows: list[dict[str, Any]], precision: str, compute: str) -> dict[str, Any]:
        by_row = {(r["shard_key"], r["first_prompt_row"]): r for r in rows}
        prompts = {}
        for key in {r["shard_key"] for r in rows}:
            ids = load(self.store.get(key))["prompt_ids"].tolist()
            for (shard, first), row in by_row.items():
                if shard == key:
                    prompts[row["trajectory_id"]] = ids[first : first + row["prompt_tokens"]]
        partitions = []
        for number in range(4):  # two a teacher, so that the second one finds its model loaded
            part = rows[number % 2 :: 2]
            partitions.append({
                "partition": number, "teacher_index": number // 2, "teacher_id": f"teacher-{number // 2}",
                "kind": "opd",
                "model": self.model(self.teachers[number // 2], precision, compute),
                "items": [
                    {f: r[f] for f in ("trajectory_id", "shard_key", "shard_digest", "first_row", "response_tokens")}
                    | {"context_ids": prompts[r["trajectory_id"]]}
                    for r in part
                ],
            })  # fmt: skip
        return {"root": str(self.root), "run_id": name, "iteration": 0, "stage_prefix": f"runs/{name}/00000/teach/f",
                "run_epoch": 1, "batch_tokens": 16384, "threads": THREADS, "dead_after_seconds": 60.0,
                "partitions": partitions}  # fmt: skip

    def hidden_rows(self, name: str) -> list[dict[str, Any]]:
        manifests = [self.manifest(f"runs/{name}/00000/teach/f/p{number:05d}") for number in range(4)]
        self.stats[f"teach {name}"] = manifests[1]["stats"]
        return [json.loads(line) for m in manifests for line in self.store.get(m["rows_key"]).splitlines()]

    def hidden(self, name: str) -> list[torch.Tensor]:
        """States of every (teacher, trajectory), in one order."""
        rows = sorted(self.hidden_rows(name), key=lambda r: (r["teacher_index"], r["trajectory_id"]))
        objects = {key: load(self.store.get(key))["hidden"] for key in {r["object_key"] for r in rows}}
        return [objects[r["object_key"]][r["first_object_row"] :][: r["rows"]] for r in rows]

    def train_work(
        self, name: str, rows: list[dict[str, Any]], hidden: list[dict[str, Any]], precision: str, compute: str,
        **settings: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """One step over every (trajectory, teacher) pair: four packs in two slots."""
        tokens = sum(r["sampled_tokens"] for r in rows)
        plan = []
        for pack in range(4):
            offset = 0
            for row in rows[pack % 2 :: 2]:
                length = row["prompt_tokens"] + row["response_tokens"]
                plan.append({
                    "run_id": name, "iteration": 0, "split": "train", "step": 0, "rank_slot": pack % 2,
                    "micro_batch": pack // 2, "pack_id": pack, "offset": offset, "length": length,
                    "trajectory_id": row["trajectory_id"], "teacher_index": pack // 2, "weight": 1.0,
                    "denominator_tokens": tokens,
                })  # fmt: skip
                offset += length
        for table, content in (("plan", plan), ("trajectories", rows), ("hidden", hidden)):
            (self.folder / f"{name}-{table}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))
        train = {"learning_rate": 1e-5, "gradient_clip": 1e9, "save_every_steps": 0, "loader_bytes": 1 << 30}
        return {
            "root": str(self.root), "run_id": name, "iteration": 0, "owned": f"runs/{name}/00000/train/f/p00000",
            "run_epoch": 1, "student": self.model(self.student, precision, compute), "optimizer_from": None,
            "threads": THREADS, "page_tokens": 64,
            "plan_rows_path": str(self.folder / f"{name}-plan.jsonl"),
            "trajectory_rows_path": str(self.folder / f"{name}-trajectories.jsonl"),
            "hidden_rows_path": str(self.folder / f"{name}-hidden.jsonl"),
            "teachers": [to_json(own_head(i, t)) for i, t in enumerate(self.teachers)],
            "vocab_size": self.vocab_size,
            "settings": to_json(train_settings(Train.model_validate(train | settings))),
            "scratch": str(self.folder / f"{name}-scratch"),
            "dead_after_seconds": 60.0,
        }  # fmt: skip

    def trained(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, float]]:
        """(gradient of the first step, new masters, metrics of all teachers)."""
        manifest = self.manifest(f"runs/{name}/00000/train/f/p00000")
        self.stats[f"train {name}"] = manifest["stats"]
        found: dict[str, dict[str, torch.Tensor]] = {"export": {}, "optimizer": {}}
        for entry in manifest["objects"]:
            if entry["name"].endswith(".safetensors"):
                found[entry["group"]] |= load(self.store.get(entry["key"]))
        rows = [json.loads(line) for line in self.store.get(manifest["rows_key"]).splitlines()]
        metrics = {r["name"]: r["value"] for r in rows if r["teacher_index"] is None}
        # Adam's first moment after one step is the gradient times 1 - beta1.
        gradient = {n.removeprefix("exp_avg."): t for n, t in found["optimizer"].items() if n.startswith("exp_avg.")}
        return gradient, found["export"], metrics


def whole(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def across_devices(loop: Loop, precision: str) -> None:
    """The CPU's shards and plan, taken up by the GPU."""
    cpu = f"cpu-{precision}"
    loop.wait(loop.start("rollout", f"rollout-{cpu}", loop.rollout_work(cpu, precision), cuda=False))
    rows = loop.rollout_rows(cpu)
    kinds = {"oracle": ("fp32", False), "cpu": ("bf16", False), "gpu": ("bf16", True)}
    names = {kind: f"{kind}-{precision}" for kind in kinds}
    loop.wait(*(
        loop.start("teach", f"teach-{names[k]}", loop.teach_work(names[k], rows, precision, compute), cuda=cuda)
        for k, (compute, cuda) in kinds.items()
    ))  # fmt: skip
    states = {kind: loop.hidden(names[kind]) for kind in kinds}
    flat = {kind: torch.cat([s.flatten() for s in found]) for kind, found in states.items()}
    errors = {kind: relative_error(flat[kind], flat["oracle"]) for kind in ("cpu", "gpu")}
    loop.check(f"{precision}, hidden states against fp32", errors["gpu"], FACTOR * errors["cpu"])
    hidden = loop.hidden_rows(names["cpu"])
    loop.wait(*(
        loop.start(
            "train", f"train-{names[k]}", loop.train_work(names[k], rows, hidden, precision, compute), cuda=cuda
        )
        for k, (compute, cuda) in kinds.items()
    ))  # fmt: skip
    trained = {kind: loop.trained(names[kind]) for kind in kinds}
    oracle = whole(trained["oracle"][0])
    errors = {kind: relative_error(whole(trained[kind][0]), oracle) for kind in ("cpu", "gpu")}
    loop.check(f"{precision}, the step's gradient against fp32", errors["gpu"], FACTOR * errors["cpu"])
    by_name = max(
        (relative_error(trained["gpu"][0][n], t) / (relative_error(trained["cpu"][0][n], t) + 1e-3), n)
        for n, t in trained["oracle"][0].items()
    )
    loop.check(f"{precision}, the worst tensor of it, {by_name[1]}, against the CPU's error", by_name[0], 2 * FACTOR)
    moved = {k: whole(trained[k][1]) - whole(trained["oracle"][1]) for k in ("cpu", "gpu")}
    loop.check(f"{precision}, new masters against fp32's, rms", float(moved["gpu"].square().mean().sqrt()),
               FACTOR * float(moved["cpu"].square().mean().sqrt()))  # fmt: skip
    losses = {kind: trained[kind][2]["loss"] for kind in kinds}
    loop.check(f"{precision}, loss {losses['gpu']:.6f} against fp32's", abs(losses["gpu"] / losses["oracle"] - 1), 5e-3)
    gap = trained["gpu"][2]
    loop.check(f"{precision}, |logged by the CPU - recomputed by the GPU|, mean", gap["mismatch_sampler_mean"],
               MEAN_MISMATCH)  # fmt: skip


def on_the_gpu(loop: Loop, precision: str, ranks: int) -> None:
    """An iteration of the GPU alone."""
    name = f"alone-{precision}"
    loop.wait(loop.start("rollout", f"rollout-{name}", loop.rollout_work(name, precision), cuda=True))
    rows = loop.rollout_rows(name)
    loop.wait(loop.start("teach", f"teach-{name}", loop.teach_work(name, rows, precision, "bf16"), cuda=True))
    hidden = loop.hidden_rows(name)
    loop.wait(loop.start("train", f"train-{name}", loop.train_work(name, rows, hidden, precision, "bf16"), cuda=True))
    gradient, masters, metrics = loop.trained(name)
    loop.check(f"{precision}, |logged - recomputed| on the GPU, largest", metrics["mismatch_sampler_max"],
               SAME_DEVICE_MISMATCH)  # fmt: skip
    if ranks > 1:
        more = f"ranks-{precision}"
        work = loop.train_work(more, rows, hidden, precision, "bf16", zero_stage=3)
        loop.wait(loop.start("train", f"train-{more}", work, cuda=True, ranks=ranks))
        other, other_masters, _ = loop.trained(more)
        what = f"{precision}, ZeRO-3 on {ranks} GPUs against ZeRO-1 on one"
        loop.check(f"{what}: gradient", relative_error(whole(other), whole(gradient)), RANKS_ERROR)
        changed = whole(masters) - whole(other_masters)
        loop.check(f"{what}: new masters, share that differ by more than a tenth of the rate",
                   float((changed.abs() > 1e-6).float().mean()), 0.02)  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=["small", "smollm2-135m"], default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8, help="of each of two partitions")
    parser.add_argument("--new", type=int, default=64, help="response tokens")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of ZeRO-3")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "mxfp4"])
    parser.add_argument("--gpu-only", action="store_true", help="leave out what is compared with the CPU")
    chosen = parser.parse_args(arguments)
    shutil.rmtree(chosen.folder, ignore_errors=True)
    chosen.folder.mkdir(parents=True)
    loop = Loop(chosen.folder, chosen.shape, chosen.prompts, chosen.new)
    # Most of the time is processes starting, so the chains run side by side.
    with ThreadPoolExecutor(2 * len(chosen.precisions)) as pool:
        chains = [pool.submit(on_the_gpu, loop, precision, chosen.ranks) for precision in chosen.precisions]
        if not chosen.gpu_only:
            chains += [pool.submit(across_devices, loop, precision) for precision in chosen.precisions]
        for chain in chains:
            chain.result()
    for name, stats in sorted(loop.stats.items()):
        tokens = stats.get("sampled_tokens", stats.get("tokens"))
        rate = f", {tokens / stats['seconds']:,.0f} tokens/s" if tokens else ""
        peak = f"{stats['device_peak_bytes'] / 2**30:.2f} GiB on {stats['device']}"
        print(f"     {name}: {stats['seconds']:.2f} s{rate}, peak {peak}")
    return 1 if loop.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
