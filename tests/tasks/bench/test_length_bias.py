"""The length-bias bench's instruments: the KS test against tables, the picture against its numbers, the policy."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree

import pytest

from tasks.bench.kolmogorov import kolmogorov_tail, ks_two_sample
from tasks.bench.length_bias import discard_and_regenerate
from tasks.bench.survival_plot import survival_svg
from tasks.bench.trial import Trial


@pytest.mark.parametrize(
    ("x", "below"),
    [(0.0, 0.0), (0.1, 0.0), (0.3, 0.000009), (0.4, 0.002808), (0.5, 0.036055), (0.8, 0.455857), (1.0, 0.730000),
     (1.22385, 0.9), (1.35810, 0.95), (1.62762, 0.99), (1.94947, 0.999), (1.5, 0.977782), (2.0, 0.999329)],
)  # fmt: skip
def test_kolmogorov_distribution_against_smirnovs_table(x, below):
    assert kolmogorov_tail(x) == pytest.approx(1 - below, abs=2e-6)


def test_distance_by_hand():
    assert ks_two_sample([1, 2, 3], [1, 2, 3]) == (0.0, 1.0)
    assert ks_two_sample([1, 2], [3, 4])[0] == 1.0
    assert ks_two_sample([1, 1, 1, 2], [1, 2, 2, 2])[0] == 0.5
    assert ks_two_sample([0, 10], [5])[0] == 0.5


@pytest.mark.parametrize("shift", [0.0, 0.25, 0.5])
def test_p_against_permutations(shift):
    rng = random.Random(5)
    a = [rng.gauss(0, 1) for _ in range(60)]
    b = [rng.gauss(shift, 1) for _ in range(50)]
    distance, p = ks_two_sample(a, b)
    both, larger = a + b, 0
    for _ in range(600):
        rng.shuffle(both)
        larger += ks_two_sample(both[:60], both[60:])[0] >= distance - 1e-12
    assert p == pytest.approx(larger / 600, abs=0.06)


def test_picture_shows_the_shares():
    samples = {"a < b": [10, 10, 40, 100], "c": [5], "d & e": list(range(1, 1001))}
    root = ElementTree.fromstring(survival_svg("Title & more", samples))
    ns = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in root.iter(f"{ns}text")]
    for text in ("Title & more", "a < b", "c", "d & e", "100%", "0.1%", "0", "1000"):
        assert text in texts
    lines = list(root.iter(f"{ns}polyline"))
    assert len(lines) == 3
    points = [[tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in lines]
    by_text = {t.text: float(t.attrib["y"]) - 4 for t in root.iter(f"{ns}text")}
    assert points[0][0][1] == pytest.approx(by_text["100%"], abs=0.1)
    # Of 1..1000, one in a thousand is longer than 999.
    assert points[2][-1][1] == pytest.approx(by_text["0.1%"], abs=0.1)
    for corners in points:
        assert corners == sorted(corners)


def test_without_preemption_the_policy_is_an_undisturbed_run(tmp_path):
    """And with it, what it throws away is lost, and the batch is closed without the rest."""
    trial = Trial(tmp_path, partitions=1, trajectories=12, response_tokens=60, max_sequences=4, seed=2)
    whole = discard_and_regenerate(trial, 0, mean_steps=1e9, closed_at=1.0)
    assert len(whole.lengths) == 12
    assert whole.lost_tokens == 0
    assert max(whole.lengths) <= 60
    assert whole.lengths == discard_and_regenerate(trial, 0, mean_steps=1e9, closed_at=1.0).lengths
    cut = discard_and_regenerate(trial, 0, mean_steps=40, closed_at=0.75)
    assert 9 <= len(cut.lengths) <= 12
    assert cut.lost_tokens > 0
