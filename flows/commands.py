"""What each command of `opd` does. A command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from flows.parser import BENCHES
from schemas.errors import ConfigError, FormatError


def _load(arguments: argparse.Namespace):
    from schemas import config

    return config.load(arguments.config, arguments.settings)


def quiet_prefect() -> None:
    """Before prefect is imported: no analytics, and room for a slow first start of its ephemeral server."""
    for name, value in {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
    }.items():
        os.environ.setdefault(name, value)


def _run(arguments: argparse.Namespace) -> int:
    quiet_prefect()
    from flows import summary
    from flows.campaign import run_campaign
    from flows.progress import Bars

    config = _load(arguments)
    started = time.monotonic()
    with Bars() as bars:
        results, notes = run_campaign(config, progress=bars, from_iteration=arguments.from_iteration)
    summary.print_campaign(config, results, notes, seconds=time.monotonic() - started)
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from schemas import reference

    if arguments.reference == (arguments.config is not None):
        raise ConfigError(
            "opd config", expected="CONFIG.toml or --reference",
            found="both" if arguments.reference else "neither", next_command="opd config --help",
        )  # fmt: skip
    print(reference.markdown() if arguments.reference else reference.toml(_load(arguments)), end="")
    return 0


def _single(arguments: argparse.Namespace) -> int:
    from flows.progress import Bars
    from flows.single import run_single

    with Bars() as bars:
        result = run_single(_load(arguments), arguments.command, arguments.iteration, progress=bars)
    print(json.dumps(result.reference(), indent=2))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from flows import summary
    from tasks.operate import show

    if arguments.run_id is None:
        print("\n".join(show.runs(arguments.data)) or f"no runs in {arguments.data}")
        return 0
    summary.print_run(
        arguments.data, arguments.run_id, iteration=arguments.iteration, num=arguments.num, best=arguments.best
    )
    return 0


def _sql(arguments: argparse.Namespace) -> int:
    from flows import summary
    from infra.spark import SparkChild
    from schemas.config import Spark
    from tasks.operate.sql_in_spark import query

    log = Path("scratch").absolute() / "sql.log"
    with SparkChild(arguments.data, Spark().model_dump(), log) as spark:
        answer = spark.call(query, text=arguments.query, limit=arguments.limit)
    summary.print_rows(answer["columns"], answer["rows"], as_json=arguments.json)
    if answer["more"]:
        print(f"the first {arguments.limit} rows; more are left: --limit N", file=sys.stderr)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from flows.progress import Bars
    from tasks.operate.verify import verify

    with Bars() as bars:
        checks = verify(arguments.data, arguments.run_id, progress=bars)
    for check in checks:
        word = "BREACH" if check.breaches else "-" if check.skipped else "ok"
        print(f"{word:<6}  {check.name} ({check.skipped or check.count})")
        for note in check.notes:
            print(f"          {note}")
        for breach in check.breaches[:10]:
            print(f"          {breach}")
        if len(check.breaches) > 10:
            print(f"          and {len(check.breaches) - 10} more")
    breaches = sum(len(check.breaches) for check in checks)
    print(f"{arguments.run_id}: {len(checks)} checks, {breaches} breaches")
    if breaches:
        print(f"next: opd repair {arguments.run_id} --data {arguments.data}")
    return 1 if breaches else 0


def _export(arguments: argparse.Namespace) -> int:
    from tasks.operate.export import export

    done = export(
        arguments.data, arguments.run_id, arguments.to, iteration=arguments.iteration, dtype=arguments.dtype
    )  # fmt: skip
    print(f"{done.folder}: student of iteration {done.iteration}, {done.size_bytes / 1e6:.0f} MB, {done.version}")
    return 0


def _repair(arguments: argparse.Namespace) -> int:
    from flows import summary
    from flows.progress import Bars
    from infra.spark import SparkChild
    from schemas.config import Spark
    from tasks.operate.repair import repair

    log = Path("scratch").absolute() / "repair.log"
    with Bars() as bars, SparkChild(arguments.data, Spark().model_dump(), log) as spark:
        found = repair(arguments.data, arguments.run_id, spark, dry_run=arguments.dry_run, progress=bars)
    if found:
        rows = [[f.what, f.found, f"BROKEN, {f.done}" if f.broken else f.done] for f in found]
        summary.print_rows(["what", "found", "done"], rows, as_json=False)
    broken = sum(f.broken for f in found)
    verb = "would be repaired" if arguments.dry_run else "repaired"
    print(f"{arguments.run_id}: {len(found) - broken} {verb}, {broken} broken")
    return 1 if broken else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from infra.doctor import examine
    from schemas.config import Spark, Train

    spark = Spark(jars=arguments.jars)
    shm_bytes = Train.model_validate({}).loader_bytes
    status = 0
    for promise in examine(arguments.data, Path(arguments.scratch), shm_bytes, spark):
        detail = "" if promise.found == "kept" else ": " + promise.found.replace("\n", "\n          ")
        print(f"{'kept  ' if promise.kept else 'BROKEN'}  {promise.name}{detail}", flush=True)
        if not promise.kept:
            status = status or promise.exit_status
    print(f"{arguments.data}: " + ("runs can rely on it" if status == 0 else "do not start a run here"))
    return status


def _models(arguments: argparse.Namespace) -> int:
    from tasks.demo.models import prepare

    prepare(arguments.to)
    return 0


def _teachers(arguments: argparse.Namespace) -> int:
    from flows import summary
    from tasks.operate import teachers

    if arguments.action == "pack":
        before, after = teachers.pack(arguments.source, arguments.to)
        print(f"{arguments.to}: {after:,} bytes of weights, {after / before:.2f} of {arguments.source}")
        return 0

    def on_model(model: str) -> None:
        print(f"reading: {model}", file=sys.stderr, flush=True)

    def on_left_out(model: str) -> None:
        print(f"left out: {model}, whose kind keeps its own dtype: no MXFP4 to compare", file=sys.stderr, flush=True)

    rows = teachers.report(_load(arguments), num_prompts=arguments.prompts, on_model=on_model, on_left_out=on_left_out)
    if arguments.json:
        print("\n".join(json.dumps(row) for row in rows))
        return 0
    columns = ["model", "set to", "positions", "KL mean", "KL max", "top-1", "FP8 inexact"]
    figures = [
        [
            row["model"], row["precision"], row["positions"], f"{row['kl_mean']:.4f}", f"{row['kl_max']:.3f}",
            f"{row['top1_agreement']:.1%}", f"{row['fp8_inexact']} of {row['linears']}",
        ]
        for row in rows
    ]  # fmt: skip
    summary.print_rows(columns, figures, as_json=False)
    print(
        "MXFP4 against bf16 weights of the same model: KL(MXFP4 || bf16) a position in nats, share of equal top tokens"
    )
    return 0


def _wal(arguments: argparse.Namespace) -> int:
    from flows import summary
    from tasks.operate.wal import read_logs

    logs = []
    for log in read_logs(arguments.path):
        logs.append(log)
        if arguments.json:
            print(json.dumps(log.to_json(), ensure_ascii=False))
        elif arguments.action == "show":
            summary.print_log(log)
        else:
            summary.print_log_check(log)
    damaged = sum(bool(log.faults) for log in logs)
    if not arguments.json:
        segments, tokens = sum(len(log.segments) for log in logs), sum(log.num_tokens for log in logs)
        print(f"{len(logs)} logs, {segments} segments, {tokens:,} tokens: {damaged} damaged")
    return FormatError.exit_status if damaged else 0


def _upkeep(arguments: argparse.Namespace) -> int:
    from tasks.operate.upkeep import upkeep

    scratch = Path(arguments.scratch)
    for line in upkeep(arguments.data, arguments.run_ids or None, scratch=scratch, dry_run=arguments.dry_run):
        of_run = f" of {line.run_id}" if line.run_id else ""
        verb = "would go" if arguments.dry_run else "deleted"
        print(f"{verb}: {line.num_objects:>8,} {line.what}{of_run}, {line.num_bytes:,} bytes")
    return 0


def _watch(_arguments: argparse.Namespace) -> int:
    from flows.watch import watch

    print("\n".join(watch()) or "every running campaign has a living driver")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    # A child: figures are those of a fresh process, and this one stays free of torch.
    module = BENCHES[arguments.name]
    options = [f"--{name}" for name in ("json", "quick") if getattr(arguments, name)]
    options += [
        f"--{name}={value}" for name in ("kills", "plot", "parts") if (value := getattr(arguments, name)) is not None
    ]
    return subprocess.call([sys.executable, "-m", module, arguments.name, *options])


COMMANDS = {
    "run": _run, "config": _config, "rollout": _single, "teach": _single, "dispatch": _single, "train": _single,
    "show": _show, "sql": _sql, "verify": _verify, "doctor": _doctor, "models": _models, "bench": _bench,
    "teachers": _teachers, "wal": _wal, "upkeep": _upkeep, "repair": _repair, "export": _export, "watch": _watch,
}  # fmt: skip
