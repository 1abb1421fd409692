"""The command line itself: what is mistyped is said like any other error, and help is there for every command."""

from __future__ import annotations

import importlib.metadata

import pytest

import kernels.bench
import ml.bench
import tasks.bench.__main__
from flows import cli, parser
from schemas import config

COMMANDS = (
    "run", "rollout", "teach", "dispatch", "train", "show", "sql", "verify", "doctor", "bench", "models", "teachers",
    "teachers report", "teachers pack", "wal", "wal show", "wal check", "upkeep", "watch",
    "repair", "config", "export",
)  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("rn demo.toml", "did you mean 'run'"),
        ("run", "CONFIG.toml"),
        ("train run.toml", "--iteration"),
        ("train run.toml --iteration one", "invalid int value: 'one'"),
        ("bench walx", "did you mean 'wal'"),
        ("teachers repot run.toml", "did you mean 'report'"),
        ("run run.toml --sett a=1 --from-iteratoin 3", "--from-iteratoin"),
    ],
)
def test_a_mistyped_command_line_is_an_error_of_the_family(capsys, typed, found):
    assert cli.main(typed.split()) == 2
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    assert out == ""
    assert [line.split(": ")[0] for line in lines] == ["config error", "expected", "found", "safe", "next"]
    assert lines[0].startswith("config error: opd")
    assert lines[1].startswith("expected: opd")
    assert found in lines[2]
    assert lines[4].endswith(" --help")


def test_every_bench_is_offered_under_its_module():
    modules = {"kernels.bench": kernels.bench, "ml.bench": ml.bench, "tasks.bench": tasks.bench.__main__}
    assert {name: module for module, found in modules.items() for name in found.BENCHES} == parser.BENCHES


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: opd {command} ")
    assert len(out.split("\n\n")[1]) > 30, "what it does"


def test_help_lists_exactly_these_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ") and
              line[4:5].isalpha()]  # fmt: skip
    assert sorted(listed) == sorted(name for name in COMMANDS if " " not in name)


def test_a_configuration_is_checked_and_printed_with_its_defaults(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'run_id = "r"\n[student]\npath = "s"\n[[teachers]]\nid = "a"\npath = "x"\n'
        '[[prompts.files]]\npath = "p.jsonl"\nteachers = ["a"]\n'
    )
    assert cli.main(["config", str(path), "--set", "rollout.top_k=5"]) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert config.load(printed) == config.load(path, ["rollout.top_k=5"])
    assert cli.main(["config", str(path), "--set", "rollout.top_q=5"]) == 2
    assert "did you mean 'top_" in capsys.readouterr().err


def test_the_reference_of_settings_is_printed(capsys):
    assert cli.main(["config", "--reference"]) == 0
    assert "| `max_response_tokens` | integer, > 0 | `64` |" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["config"], ["config", "run.toml", "--reference"]])
def test_config_takes_a_file_or_the_reference(capsys, arguments):
    assert cli.main(arguments) == 2
    assert "CONFIG.toml or --reference" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"opd {importlib.metadata.version('opd')}\n"


@pytest.mark.parametrize("more", [True, False])
def test_rows_that_are_left_out_are_told(capsys, monkeypatch, more):
    answer = {"columns": ["n"], "rows": [[1], [2]], "more": more}
    monkeypatch.setattr("infra.spark.SparkChild.call", lambda *_, **__: answer)
    assert cli.main(["sql", "SELECT 1", "--limit", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ['{"n": 1}', '{"n": 2}']
    assert err == ("the first 2 rows; more are left: --limit N\n" if more else "")
