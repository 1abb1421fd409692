"""What the commands print for a person: the end of a campaign, a run, rows of a query."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from schemas.config import RunConfig
from schemas.root import DataRoot
from tasks.operate.wal import LogReport
from tasks.runs.finished import StageResult

READY_QUERY = (
    "SELECT domain, count(*), avg(reward) FROM opd.trajectories JOIN opd.prompts USING (prompt_id) GROUP BY domain"
)


def _number(value: Any, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _heldout(stats: dict[str, Any], figure: str, when: str, teacher: str) -> str:
    """An iteration of an older record may have had another objective, other teachers, or another precision."""
    return _number(stats.get(f"heldout_{figure}_{when}", {}).get(teacher))


def _won_back(stats: dict[str, Any], figure: str) -> str:
    """Training's share of what four bits had added to a figure, on the same held-out tokens."""
    if f"heldout_{figure}_unquantised" not in stats:
        return "-"
    plain, before, after = (stats[f"heldout_{figure}_{when}"]["all"] for when in ("unquantised", "before", "after"))
    if plain is None or before <= plain:
        return "-"
    return f"{(before - after) / (before - plain):.0%}"


def _add_heldout_rows(
    row: Callable[[str, Iterable[str]], None], config: RunConfig, figure: str, trained: list[dict[str, Any]]
) -> None:
    """Rows of one figure of the objective on held-out prompts."""
    shown = figure.replace("kl", "KL")
    for key in ("all", *config.teacher_ids):
        to = "" if not config.teacher_ids else " to all teachers" if key == "all" else f" to teacher {key}"
        row(
            f"held-out {shown}{to}, before -> after",
            (f"{_heldout(s, figure, 'before', key)} -> {_heldout(s, figure, 'after', key)}" for s in trained),
        )
    if config.student.precision == "mxfp4":
        plain = (_heldout(s, figure, "unquantised", "all") for s in trained)
        row(f"held-out {shown} before, had the weights bf16 values", plain)
        row("share of what four bits cost, won back", (_won_back(s, figure) for s in trained))


def _iterations_table(config: RunConfig, results: list[dict[str, StageResult]]) -> Table:
    """A column an iteration, so that any number of teachers fits a terminal."""
    table = Table(title=f"run {config.run_id}", title_justify="left")
    table.add_column("iteration")
    for stages in results:
        table.add_column(str(stages["rollout"].iteration), justify="right")
    rolled = [stages["rollout"].stats for stages in results]
    trained = [stages["train"].stats for stages in results]

    def row(name: str, values: Iterable[str]) -> None:
        table.add_row(name, *values)

    row("trajectories", (str(int(s["trajectories"])) for s in rolled))
    row("tokens sampled", (str(int(s["sampled_tokens"])) for s in rolled))
    row("mean reward, training prompts", (_number(s.get("train_reward"), 3) for s in rolled))
    if any(s["verifier_failures"] for s in rolled):
        row("failed verifier calls, reward null", (_number(int(s["verifier_failures"])) for s in rolled))
    if any(s["given_up"] for s in rolled):
        row("trajectories given up, not trained on", (_number(int(s["given_up"])) for s in rolled))
    row("mean reward, held-out prompts", (_number(s.get("heldout_reward"), 3) for s in rolled))
    for figure in config.train.objective.metrics:
        _add_heldout_rows(row, config, figure, trained)
    row("teacher head loads a mini-batch", (_number(s["head_loads_per_mini_batch"], 0) for s in trained))
    row("log-prob mismatch in the sampler's precision, mean", (_number(s["mismatch_sampler_mean"], 6) for s in trained))
    row("log-prob mismatch as trained, mean", (_number(s["mismatch_trained_mean"], 6) for s in trained))
    if config.student.precision == "mxfp4":
        inexact = (str(len(s["fp8_inexact"])) if "fp8_inexact" in s else "-" for s in trained)
        row("linears whose MXFP4 values FP8 would change", inexact)
    return table


def print_campaign(
    config: RunConfig, results: list[dict[str, StageResult]], notes: dict[str, Any], *, seconds: float
) -> None:
    """The end of `opd run`."""
    console = Console()
    console.print(_iterations_table(config, results))
    drill = next((s["rollout"].stats["drill"] for s in results if "drill" in s["rollout"].stats), None)
    if drill:
        console.print(
            f"drill: a rollout worker was killed (SIGKILL) after {drill['acknowledged']} acknowledged tokens: "
            f"{drill['lost']} acknowledged tokens lost, {drill['regenerated']} regenerated"
        )
    for name, value in notes.items():
        console.print(f"{name}: {value}")
    where = DataRoot.parse(config.data).absolute
    option = "" if config.data == "data" else f" --data {config.data}"
    console.print(f"tables    {where}/tables (database opd)", highlight=False, soft_wrap=True)
    console.print(f'query     opd sql{option} "{READY_QUERY}"', highlight=False, soft_wrap=True)
    console.print(f"texts     opd show {config.run_id}{option}", highlight=False)
    console.print(f"check     opd verify {config.run_id}{option}", highlight=False)
    console.print(f"student   opd export {config.run_id}{option} --to FOLDER", highlight=False)
    api = os.environ.get("PREFECT_API_URL")
    ui = (
        api.removesuffix("/").removesuffix("/api")
        if api
        else "none running (prefect server start; then set PREFECT_API_URL)"
    )
    console.print(f"Prefect   {ui}", highlight=False, soft_wrap=True)
    console.print(f"{seconds:.0f} s", highlight=False)


def print_rows(columns: list[str], rows: list[list[Any]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False))
        return
    table = Table()
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("null" if v is None else str(v) for v in row))
    Console().print(table)


def print_run(root: str, run_id: str, *, iteration: int | None, num: int, best: bool) -> None:
    """The answer of `opd show RUN`."""
    from tasks.operate import show

    texts = show.texts(root, run_id, iteration=iteration, num=num, best=best)
    stages = show.stages(root, run_id)
    print_rows(list(stages[0]) if stages else ["stage"], [list(s.values()) for s in stages], as_json=False)
    for text in texts:
        print(f"\n--- iteration {text['iteration']}, {text['domain']}, {text['trajectory_id']}")
        print(f"question  {text['question'].strip()}")
        print(f"response  {text['response'].strip()}")
        reward = _number(text["reward"], 3)
        print(f"expected  {text['answer']}   reward {reward}, {text['tokens']} tokens, {text['finish_reason']}")


def print_log(log: LogReport) -> None:
    """The answer of `opd wal show` for one log."""
    header = log.header
    print(f"\n{log.where}")
    if header is not None:
        print(f"run {header.run_id}, iteration {header.iteration}, partition {header.partition}, epoch {header.epoch}, "
              f"student {header.student_digest[:16]}")  # fmt: skip
    print(f"  {'segment':12}{'state':9}{'bytes':>12}{'records':>9}  sequence numbers")
    for s in log.segments:
        numbers = "" if s.first_sequence is None else f"{s.first_sequence} to {s.last_sequence}"
        torn = f"  ({s.torn_bytes} bytes torn)" if s.torn_bytes else ""
        print(f"  {s.name:12}{s.state:9}{s.size_bytes:12,}{s.num_records:9,}  {numbers}{torn}")
    heads = f"{'prompt':>9}{'sampled':>9}{'observed':>9}{'KV spilled':>12}{'preempted':>11}"
    print(f"  number{heads}  finish  trajectory_id")
    for t in log.trajectories:
        known = ["?" if t[name] is None else str(t[name]) for name in ("prompt_tokens", "num_preemptions")]
        counts = f"{known[0]:>9}{t['sampled']:9,}{t['observed']:9,}{t['spilled_positions']:12,}{known[1]:>11}"
        name = t["trajectory_id"] or "(admitted in an earlier segment)"
        print(f"  {t['number']:6}{counts}  {t['finish_reason'] or '-':6}  {name}")
    print("  " + ", ".join(f"{count:,} {name}" for name, count in log.records.items()) + f"; {log.num_tokens:,} tokens")
    _print_faults(log)


def print_log_check(log: LogReport) -> None:
    """The answer of `opd wal check` for one log."""
    num_records = sum(log.records.values())
    facts = f"{len(log.segments)} segments, {num_records} records, {log.num_tokens:,} tokens, {log.num_bytes:,} bytes"
    print(f"{'DAMAGED' if log.faults else log.state:8}{log.where}: {facts}")
    for segment in log.segments:
        if segment.torn_bytes:
            print(f"          {segment.name}: {segment.torn_bytes} bytes of an unfinished group at its end are dropped")
    _print_faults(log)


def _print_faults(log: LogReport) -> None:
    for fault in log.faults:
        print(f"          {fault.where}: expected {fault.expected}, found {fault.found}")
