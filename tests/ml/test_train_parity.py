"""Gradients, updates and metrics of training against plain torch in float64, for any split into packs and ranks.

The oracle is transformers' own model, one trajectory a forward pass, whole softmaxes and torch's AdamW; it shares no
line with the code under test. The code under test runs as real gloo processes with DeepSpeed.
"""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.launch import free_port
from ml.checkpoint import load_model
from ml.model import PackedCausal
from schemas.errors import ContractError
from tests.support import training_rank
from tests.support.forked import FORKS, leave, redirect
from tests.support.training_world import World, make_world, plan_rows, world_of

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "loss_tiny.txt"
RANKS = (1, 2, 4)
ROWS, VOCAB = 67, 61  # a padded head: 6 further rows count nowhere
WIDTHS = {0: 8, 1: 12}
LENGTHS = [(3, 4), (1, 1), (5, 9), (2, 7), (4, 2), (6, 5)]
ITEMS = [("t000", 0, 1.0), ("t001", 0, 0.5), ("t003", 0, 1.0), ("t002", 1, 2.0), ("t000", 1, 1.0), ("t005", 1, 0.25)]

# The same six plan rows in different packs; pack p goes to slot p mod slots.
SPLITS = {
    "one_pack": ([ITEMS], 1),
    "straddling": ([ITEMS[:2], ITEMS[2:5], ITEMS[5:]], 2),
    "one_each": ([[item] for item in ITEMS], 3),
    "two_slots": ([ITEMS[:4], ITEMS[4:]], 2),
    "more_ranks_than_packs": ([ITEMS], 2),
}


def write_student(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    """A tiny Llama whose weights come from numpy, so that they are the same for every version of torch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=ROWS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = 0.3 * rng.standard_normal(tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values + ("norm" in name)))
    model.save_pretrained(folder)
    return folder


def teacher_heads() -> dict[int, torch.Tensor]:
    """bf16 values, so that rounding them again changes nothing."""
    rng = np.random.default_rng(5)
    return {t: torch.from_numpy(rng.standard_normal((ROWS, e))).to(torch.bfloat16) for t, e in WIDTHS.items()}


def scenario(name: str, plan: list[dict], **options: Any) -> dict[str, Any]:
    base = {"name": name, "plan": plan, "zero_stage": 1, "precision": "fp32", "compute": "fp32", "learning_rate": 1e-2}
    return base | {"teachers": teacher_heads()} | options


def _rank(spec: str, log: str, group: dict[str, str]) -> None:
    redirect(log, log)
    os.environ.update(group)
    try:
        training_rank.main(Path(spec))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def run_ranks(folder: Path, model: Path, world: World, scenarios: list[dict], ranks: int) -> dict[str, Any]:
    """Results of rank 0."""
    spec = folder / f"spec-{ranks}"
    spec.write_bytes(pickle.dumps({"folder": model, "world": world, "vocab_size": VOCAB, "scenarios": scenarios}))
    port = free_port()
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    logs = [folder / f"rank-{r}.log" for r in range(ranks)]
    processes = [
        FORKS.Process(target=_rank, args=(str(spec), str(logs[r]), group | {"RANK": str(r), "LOCAL_RANK": str(r)}))
        for r in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
        process.join()
    assert [p.exitcode for p in processes] == [0] * ranks, "\n".join(log.read_text() for log in logs)[-4000:]
    return torch.load(spec.with_suffix(".results"), weights_only=False)


# --- the oracle


def states_and_logits(model, ids: np.ndarray) -> torch.Tensor:
    return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]


def oracle_kl(model, world: World, trajectory_id: str, teacher: int) -> torch.Tensor:
    """float64 reverse KL of each response token, whole softmaxes over the shared vocabulary."""
    t = world.trajectories[trajectory_id]
    logits = states_and_logits(model, np.concatenate([t.prompt, t.response]))
    student = torch.log_softmax(logits[len(t.prompt) - 1 : -1, :VOCAB], -1)
    bits = t.hidden[teacher].astype(np.uint32) << 16
    hidden = torch.from_numpy(bits.view(np.float32).astype(np.float64))
    theirs = torch.log_softmax(hidden @ teacher_heads()[teacher][:VOCAB].double().T, -1)
    return (student.exp() * (student - theirs)).sum(-1)


def oracle_loss(model, world: World, items: list[tuple[str, int, float]]) -> torch.Tensor:
    members = {i for i, _, _ in items}
    denominator = sum(int(world.trajectories[i].mask.sum()) for i in members)
    loss = torch.zeros((), dtype=torch.float64)
    for trajectory_id, teacher, weight in items:
        mask = torch.from_numpy(world.trajectories[trajectory_id].mask.astype(np.float64))
        loss = loss + weight * (mask * oracle_kl(model, world, trajectory_id, teacher)).sum() / denominator
    return loss


def load_oracle(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def oracle_steps(folder: Path, world: World, steps, *, learning_rate=1e-2, clip=1e9, warmup=0) -> dict[str, Any]:
    """Parameters, first gradient, losses and norms of plain AdamW over steps of items."""
    model = load_oracle(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    out: dict[str, Any] = {"losses": [], "norms": []}
    for number, items in enumerate(steps):
        optimizer.zero_grad()
        loss = oracle_loss(model, world, items)
        loss.backward()
        if number == 0:
            out["gradient"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        out["losses"].append(float(loss.detach()))
        out["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (min(1.0, (number + 1) / warmup) if warmup else 1.0)
        optimizer.step()
    out["parameters"] = {n: p.detach() for n, p in model.named_parameters()}
    return out


def metric(result: dict[str, Any], name: str, teacher: int | None = None) -> list[float]:
    return [value for _, n, t, value in result["metrics"] if (n, t) == (name, teacher)]


def gradient(result: dict[str, Any], name: str) -> torch.Tensor:
    """AdamW's first moment after one step is 0.1 of the gradient that it saw."""
    return result["moments"][f"exp_avg.{name}"].double() / 0.1


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = float(expected.abs().max()) + 1e-12
    assert float((found.double() - expected).abs().max()) <= tolerance * scale


def its_own_teacher(world: World, folder: Path) -> dict[str, Any]:
    """A scenario whose teacher is the student itself: its bf16 states, as the teacher stage makes them."""
    model = load_model(folder, precision="bf16", compute="bf16")
    trajectories = {}
    for name, t in world.trajectories.items():
        ids = torch.from_numpy(np.concatenate([t.prompt, t.response]).astype(np.int64))
        with torch.no_grad():
            h_ND = model(ids, torch.arange(len(ids)), PackedCausal([0, len(ids)]))[len(t.prompt) - 1 : -1]
        trajectories[name] = replace(t, hidden={0: h_ND.to(torch.bfloat16).view(torch.uint16).numpy()})
    items = [(name, 0, 1.0) for name, _, _ in ITEMS[:4]]
    own = world_of(trajectories)
    return scenario(
        "its_own_teacher", plan_rows(own, [[items[:2], items[2:]]], slots=2), world=own, precision="bf16",
        compute="bf16", teachers={0: model.head_weight.detach()},
    )  # fmt: skip


# --- one run of processes for all tests below


STEPS = [ITEMS[:3], ITEMS[3:], [ITEMS[1], ITEMS[4]]]


def three_steps(world: World) -> list[dict]:
    packs = [[STEPS[0][:1], STEPS[0][1:2], STEPS[0][2:]], [STEPS[1][:2], STEPS[1][2:]], [STEPS[2]]]
    return plan_rows(world, packs, slots=2) + plan_rows(world, [[[ITEMS[2]], [ITEMS[3]]]], slots=2, split="heldout")


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(LENGTHS, WIDTHS, vocab=VOCAB, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("students")
    return {kind: write_student(folder / kind, tied=kind == "tied") for kind in ("tied", "untied")}


@pytest.fixture(scope="module")
def results(tmp_path_factory, world, models) -> dict[int, dict[str, Any]]:
    """ranks -> scenario name -> result."""
    common = [scenario(f"{name}-{stage}", plan_rows(world, [packs], slots=slots), zero_stage=stage)
              for name, (packs, slots) in SPLITS.items() for stage in (1, 3)]  # fmt: skip
    steps = three_steps(world)
    for stage in (1, 3):
        common += [
            scenario(f"steps-{stage}", steps, zero_stage=stage, gradient_clip=0.5, warmup_steps=2),
            scenario(f"resumed-{stage}", steps, zero_stage=stage, gradient_clip=0.5, warmup_steps=2, resume_after=2),
        ]
    packs, slots = SPLITS["straddling"]
    plan = plan_rows(world, [packs], slots=slots)
    common.append(scenario("untied", plan, folder=models["untied"]))
    common.append(scenario("untied-3", plan, folder=models["untied"], zero_stage=3))
    common.append(scenario("bf16", plan, precision="bf16", compute="bf16"))
    for stage in (1, 3):
        broken = {0: torch.full((ROWS, WIDTHS[0]), torch.nan), 1: teacher_heads()[1]}
        common.append(scenario(f"not_finite-{stage}", plan, teachers=broken, zero_stage=stage))
    common.append(its_own_teacher(world, models["tied"]))
    wider = {0: torch.zeros(ROWS, WIDTHS[0] + 1), 1: teacher_heads()[1]}
    single = [scenario("no_checkpointing", plan, checkpoint_layers=False)]
    single.append(scenario("wider_head", plan, teachers=wider))
    out = {}
    for ranks in RANKS:
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        out[ranks] = run_ranks(folder, models["tied"], world, common + (single if ranks == 1 else []), ranks)
    return out


@pytest.fixture(scope="module")
def one_step(world, models) -> dict[str, dict[str, Any]]:
    return {kind: oracle_steps(models[kind], world, [ITEMS]) for kind in models}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("split", SPLITS)
def test_gradients_equal_float64_for_any_split(results, one_step, split, stage, ranks):
    result = results[ranks][f"{split}-{stage}"]
    expected = one_step["tied"]
    assert set(result["parameters"]) == set(expected["gradient"])
    for name, grad in expected["gradient"].items():
        close(gradient(result, name), grad, 2e-5)
    assert metric(result, "loss") == pytest.approx(expected["losses"], rel=1e-5)
    assert metric(result, "grad_norm") == pytest.approx(expected["norms"], rel=1e-5)


@pytest.mark.parametrize("name", ["untied", "untied-3"])
@pytest.mark.parametrize("ranks", RANKS)
def test_gradients_of_an_untied_head(results, one_step, ranks, name):
    for parameter, grad in one_step["untied"]["gradient"].items():
        close(gradient(results[ranks][name], parameter), grad, 2e-5)
    head = gradient(results[ranks][name], "lm_head.weight")
    assert torch.equal(head[VOCAB:], torch.zeros_like(head[VOCAB:])), "padding rows of the head got a gradient"


def test_recomputing_layers_changes_no_bit(results):
    plain, recomputed = results[1]["no_checkpointing"], results[1]["straddling-1"]
    for name, value in plain["parameters"].items():
        assert torch.equal(value, recomputed["parameters"][name])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", [1, 3])
def test_updates_equal_plain_adamw_with_accumulation_clipping_and_warmup(results, world, models, stage, ranks):
    result = results[ranks][f"steps-{stage}"]
    expected = oracle_steps(models["tied"], world, STEPS, clip=0.5, warmup=2)
    assert max(expected["norms"]) > 0.5, "the clip must bite"
    assert metric(result, "loss") == pytest.approx(expected["losses"], rel=1e-4)
    assert metric(result, "grad_norm") == pytest.approx(expected["norms"], rel=1e-4)
    for name, value in expected["parameters"].items():
        # Adam divides by the gradient's own size: where that is rounding noise, so is the update's sign.
        wrong = (result["parameters"][name].double() - value).abs() > 2e-4
        assert float(wrong.double().mean()) < 0.01, name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_plan_ends_in_the_same_bits(results, stage, ranks):
    straight, resumed = results[ranks][f"steps-{stage}"], results[ranks][f"resumed-{stage}"]
    for kind in ("parameters", "moments"):
        for name, value in straight[kind].items():
            assert torch.equal(value, resumed[kind][name]), name
    assert metric(straight, "loss") == metric(resumed, "loss")


@pytest.mark.parametrize("ranks", RANKS)
def test_heldout_kl_is_the_mean_over_sampled_tokens_before_and_after(results, world, models, ranks):
    result = results[ranks]["steps-1"]
    model = load_oracle(models["tied"])
    after = load_oracle(models["tied"])
    after.load_state_dict({n: p.double() for n, p in result["parameters"].items()}, strict=False)
    after.tie_weights()
    for name, student in (("heldout_kl_before", model), ("heldout_kl_after", after)):
        sums, tokens = [], []
        for trajectory_id, teacher, _ in (ITEMS[2], ITEMS[3]):
            mask = torch.from_numpy(world.trajectories[trajectory_id].mask != 0)
            with torch.no_grad():
                kl = oracle_kl(student, world, trajectory_id, teacher)[mask]
            assert metric(result, name, teacher) == pytest.approx([float(kl.mean())], rel=1e-4)
            sums.append(float(kl.sum()))
            tokens.append(int(mask.sum()))
        assert metric(result, name) == pytest.approx([sum(sums) / sum(tokens)], rel=1e-4)


@pytest.mark.parametrize("ranks", RANKS)
def test_each_head_is_loaded_at_most_once_a_mini_batch(results, ranks):
    for name in ("straddling-1", "one_each-1", "steps-1"):
        loads = metric(results[ranks][name], "head_loads")
        assert loads
        assert set(loads) <= {0.0, 1.0}
        assert loads[0] == 1.0


def test_stages_agree_and_ranks_agree_within_rounding(results):
    """Losses and gradients within 2e-6 of each other, parameters after three steps within 1e-5 on the mean."""
    reference = results[1]["steps-1"]
    for ranks in RANKS:
        for stage in (1, 3):
            result = results[ranks][f"steps-{stage}"]
            for kind in ("loss", "grad_norm"):
                assert metric(result, kind) == pytest.approx(metric(reference, kind), rel=1e-5)
            for name, value in reference["parameters"].items():
                assert float((result["parameters"][name] - value).abs().mean()) < 1e-5
            for split in SPLITS:
                one, other = results[ranks][f"{split}-{stage}"], results[1]["one_pack-1"]
                assert metric(one, "loss") == pytest.approx(metric(other, "loss"), rel=2e-6)
                for name in one["parameters"]:
                    close(gradient(one, name), gradient(other, name), 2e-6)


def test_bf16_gradients_point_where_float64_does(results, one_step):
    for ranks in RANKS:
        result = results[ranks]["bf16"]
        for name, grad in one_step["tied"]["gradient"].items():
            found = gradient(result, name)
            cosine = float((found * grad).sum() / (found.norm() * grad.norm()))
            assert cosine > 0.99, name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_that_is_not_finite_is_an_error_and_no_skipped_step(results, stage, ranks):
    error = results[ranks][f"not_finite-{stage}"]["error"]
    assert isinstance(error, ContractError)
    assert error.where == "optimizer step 0"


def test_hidden_states_that_do_not_fit_their_head_name_both_widths(results):
    error = results[1]["wider_head"]["error"]
    assert isinstance(error, ContractError)
    assert (error.where, error.found) == ("teacher 0", str(WIDTHS[0]))
    assert str(WIDTHS[0] + 1) in error.expected


def test_a_student_that_is_its_teacher_learns_nothing(results):
    for ranks in RANKS:
        result = results[ranks]["its_own_teacher"]
        assert 0 <= metric(result, "kl")[0] < 1e-4
        assert metric(result, "grad_norm")[0] < 0.02 * metric(results[ranks]["bf16"], "grad_norm")[0]


@pytest.mark.parametrize("ranks", RANKS)
def test_mismatch_is_measured_on_the_sampled_tokens_of_the_first_pack(results, world, models, ranks):
    """The logged log-probabilities are made up here, so the mismatch is their distance from the oracle's."""
    model = load_oracle(models["tied"])
    for split in ("one_pack", "straddling", "one_each"):
        gaps = []
        for trajectory_id, _, _ in SPLITS[split][0][0]:
            t = world.trajectories[trajectory_id]
            with torch.no_grad():
                logits = states_and_logits(model, np.concatenate([t.prompt, t.response]))[len(t.prompt) - 1 : -1]
            raw = torch.log_softmax(logits[:, :VOCAB], -1)
            raw = raw[torch.arange(len(t.response)), torch.from_numpy(t.response.astype(int))]
            gaps += (raw - torch.from_numpy(t.logged.astype(np.float64))).abs()[torch.from_numpy(t.mask != 0)].tolist()
        for kind in ("sampler", "trained"):
            result = results[ranks][f"{split}-1"]
            assert metric(result, f"mismatch_{kind}_mean") == pytest.approx([np.mean(gaps)], rel=1e-4)
            assert metric(result, f"mismatch_{kind}_max") == pytest.approx([max(gaps)], rel=1e-4)


def test_losses_of_a_tiny_run_are_golden(results):
    """Bit-equal on the kind of processor that made the file, whose first line names it; elsewhere within 1e-5."""
    lines = []
    for step, name, teacher, value in results[1]["steps-1"]["metrics"]:
        if name in ("loss", "grad_norm") or name.startswith(("kl", "heldout")):
            lines.append(f"{step} {name} {'all' if teacher is None else teacher} {value.hex()} {value:.9g}")
    golden = GOLDEN.read_text().splitlines()
    processor = golden[0].removeprefix("# processor: ")
    # Two makers' processors of one capability take other paths through the same library.
    maker = next(line.split()[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "vendor_id" in line)
    if processor == f"{torch.backends.cpu.get_cpu_capability()} {maker}":
        assert lines == golden[1:]
    for line, expected in zip(lines, golden[1:], strict=True):
        assert line.split()[:3] == expected.split()[:3]
        assert float(line.split()[4]) == pytest.approx(float(expected.split()[4]), rel=1e-5)
