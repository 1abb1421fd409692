"""The command line itself: what is mistyped is said like any other error, and help is there for every command."""

from __future__ import annotations

import pytest

import kernels.bench
import ml.bench
import tasks.bench.__main__
from flows import cli

COMMANDS = (
    "run", "rollout", "teach", "dispatch", "train", "show", "sql", "verify", "doctor", "bench", "models", "teachers",
    "teachers report", "teachers pack", "wal", "wal show", "wal check", "upkeep", "watch",
    "repair",
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
    assert {name: module for module, found in modules.items() for name in found.BENCHES} == cli._BENCHES


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
