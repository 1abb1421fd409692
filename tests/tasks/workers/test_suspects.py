"""Suspects against a model of workers that die: the poison is found in few crashes, and nobody else is blamed."""

from __future__ import annotations

import random

import pytest

from schemas.errors import StageError
from tasks.workers.suspects import Suspects, check_given_up

LENGTH = 30


class Cluster:
    """Trajectories t00, t01, ... of LENGTH tokens; a worker holds `size` at once, oldest first.

    poison: {trajectory: tokens at which it kills}; stuck: {trajectory: tokens at which it stands still}.
    """

    def __init__(self, count: int, size: int, poison: dict[str, int], stuck: dict[str, int] | None = None) -> None:
        self.ids = [f"t{i:02d}" for i in range(count)]
        self.size, self.poison, self.stuck = size, poison, stuck or {}
        self.tokens = dict.fromkeys(self.ids, 0)
        self.suspects = Suspects(self.ids)
        self.given_up: dict[str, str] = {}
        self.lives = 0

    def finished(self, trajectory_id: str) -> bool:
        return self.tokens[trajectory_id] >= LENGTH or trajectory_id in self.given_up

    def live(self, steps: int = 10**9, report_every: int = 1) -> bool:
        """One worker; True when nothing is left. `steps`: the cluster takes the node away after so many."""
        self.lives += 1
        groups = self.suspects.groups
        assert sorted(i for g in groups for i in g) == self.ids
        self.suspects.started()
        self.suspects.resumed(dict(self.tokens))
        told_first = False
        for group in groups:
            began = dict(self.tokens)
            while running := [i for i in group if not self.finished(i)][: self.size]:
                if not told_first or steps % report_every == 0:
                    moved = self.suspects.reported(dict(self.tokens), running)
                    told_first = any(self.tokens[i] > began[i] for i in group)
                    if not moved and self.tokens[running[0]] >= self.stuck.get(running[0], LENGTH):
                        return self.end("stands still", stuck=True)
                if any(self.tokens[i] >= self.poison.get(i, LENGTH) for i in running):
                    return self.end("SIGSEGV")
                if steps <= 0:
                    return self.end("SIGKILL")
                steps -= 1
                for i in running:
                    self.tokens[i] += self.tokens[i] < self.stuck.get(i, LENGTH)
        self.suspects.reported(dict(self.tokens), [])
        return True

    def end(self, how: str, *, stuck: bool = False) -> bool:
        found = self.suspects.crashed(how, stuck=stuck)
        if found is not None:
            self.given_up[found.trajectory_id] = found.text
        return False


@pytest.mark.parametrize("size", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("at", [0, 1, 17])
@pytest.mark.parametrize("who", [0, 7, 15])
def test_poison_is_found_and_nothing_else(size, at, who):
    cluster = Cluster(16, size, {f"t{who:02d}": at})
    while not cluster.live():
        assert cluster.lives < 14
    assert list(cluster.given_up) == [f"t{who:02d}"]
    assert cluster.tokens[f"t{who:02d}"] == at
    assert f"after {at} tokens" in cluster.given_up[f"t{who:02d}"]
    assert all(n == LENGTH for i, n in cluster.tokens.items() if i != f"t{who:02d}")


@pytest.mark.parametrize("seed", range(20))
def test_several_poisons_among_random_deaths(seed):
    rng = random.Random(seed)
    poison = {f"t{rng.randrange(40):02d}": rng.randrange(LENGTH) for _ in range(3)}
    cluster = Cluster(40, 8, poison)
    while not cluster.live(steps=rng.choice([2, 5, 50, 10**9]), report_every=rng.choice([1, 4])):
        assert cluster.lives < 400
    assert set(cluster.given_up) == set(poison)


@pytest.mark.parametrize("seed", range(20))
def test_deaths_that_nobody_has_caused_blame_nobody(seed):
    """However often: each worker gets a token further, and its report of it comes through."""
    rng = random.Random(seed)
    cluster = Cluster(12, 4, {})
    while not cluster.live(steps=rng.randint(2, 4)):
        assert cluster.lives < 1000
    assert cluster.given_up == {}


def test_a_worker_that_dies_before_it_samples_blames_nobody():
    suspects = Suspects(["a"])
    for _ in range(10):
        suspects.started()
        assert suspects.crashed("SIGKILL") is None
        suspects.started()
        suspects.resumed({})
        assert suspects.crashed("SIGKILL") is None
    assert suspects.groups == [[], ["a"]] or suspects.groups == [["a"]]


def test_only_the_last_of_many_that_stood_still_is_stuck():
    cluster = Cluster(6, 3, {}, stuck={"t04": 11})
    while not cluster.live():
        assert cluster.lives < 8
    assert list(cluster.given_up) == ["t04"]
    assert cluster.tokens["t04"] == 11


def test_tokens_of_which_the_last_report_did_not_tell_clear_a_trajectory():
    suspects = Suspects(["a"])
    for tokens in range(10):  # dies each time with one more token in the log than was reported
        suspects.started()
        suspects.resumed({"a": tokens})
        suspects.reported({"a": tokens}, ["a"])
        assert suspects.crashed("SIGKILL") is None


def test_the_oldest_goes_on_by_tokens_or_by_positions_of_its_prompt():
    suspects = Suspects(["a", "b"])
    suspects.started()
    suspects.resumed({})
    assert suspects.reported({}, ["a", "b"], 0)
    assert suspects.reported({}, ["a", "b"], 256)
    assert not suspects.reported({"b": 1}, ["a", "b"], 256)
    assert suspects.reported({"a": 1, "b": 2}, ["a", "b"], 256)
    assert suspects.reported({"a": 1, "b": 2}, ["b"], 256)
    assert suspects.reported({"a": 1, "b": 2}, [], 0)


def test_more_than_allowed_is_an_error_that_names_one():
    check_given_up({}, 0, 3)
    check_given_up({2: {"t1": "SIGSEGV, 3 times after 7 tokens"}}, 1, 3)
    with pytest.raises(StageError) as caught:
        check_given_up({1: {}, 2: {"t1": "SIGSEGV, 3 times after 7 tokens", "t2": "SIGSEGV"}}, 1, 3)
    text = str(caught.value)
    assert "iteration 3, partition 2, trajectory t1" in text
    assert "at most 1" in text
    assert "3 times after 7 tokens" in text
    assert "rollout.max_given_up=2" in text
