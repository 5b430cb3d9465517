"""Episodes on one rank: the gradient of each branch alone, returns by hand, and what a group says of its episodes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from step_kit import worker_of
from test_actor import assert_same, gradients, plain
from test_groups import opened
from tiny_policy import lay_out, passes_of, run_config
from tree_kit import make_episodes, random_rows, tree_of

from streamrl import wire
from streamrl.config.learner import LearnerConfig
from streamrl.learner.algorithms.advantages import Estimator, GroupData, gae
from streamrl.learner.critic import Critic
from streamrl.learner.groups import Unusable, group_data
from streamrl.learner.metrics import StepMeter
from streamrl.learner.policy import Actor
from streamrl.learner.step import StepStats
from streamrl.learner.tree import return_to_go, spans
from streamrl.wire import NOTHING, PROMPT, ToolUse, Turn

RANDOM = np.random.default_rng(0)


def three_branches(seed, groups=3, size=3):
    """Random trees with three branches at least, beside single answers."""
    random, batch = np.random.default_rng(seed), []
    for group in range(groups):
        members = []
        while len(members) < size:
            rows = random_rows(random, turns=9)
            if len(tree_of(rows, random).branches) >= 3:
                members += make_episodes(int(random.integers(1 << 30)), groups=1, size=1, rows=rows)
        single = replace(members[0], tree=None)
        batch += [replace(one, group_id=group, prompt=members[0].prompt) for one in [*members, single]]
    return batch


def naive_logprobs(model, sample):
    """Log-probabilities of a sample, its branches as rows of a padded batch with loss on what each of them trains."""
    found = torch.zeros(len(sample.tokens))
    rows = spans(sample.tree, sample.prompt, sample.tokens)
    longest = max(len(row.ids) for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)], mask[number, : len(row.ids)] = torch.from_numpy(row.ids).long(), 1
    logprobs = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits.float(), dim=-1)
    for number, row in enumerate(rows):
        at, targets = torch.from_numpy(row.at), torch.from_numpy(row.targets)
        found = found.index_put((targets,), logprobs[number, at - 1, ids[number, at]])
    return found


def naive_gradient(model, batch):
    for sample in batch:
        logprobs = naive_logprobs(model, sample)
        weight = (logprobs.detach() - torch.from_numpy(sample.logprobs)).exp().clamp(max=2.0)
        assert weight.min() > 1e-4
        loss = -(weight * torch.from_numpy(sample.advantages) * (logprobs - logprobs.detach()).exp()).sum()
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradient_equals_each_branch_alone(one_rank, model_of, seed):
    """Rows shared, packed and of one branch each, in any micro-batches."""
    batch, model = three_branches(seed), plain(model_of("Qwen2"))
    expected = naive_gradient(model, batch)
    computed = []
    for layout, tokens in (("rows of like length", 256), ("packed", 256), ("apart", 256), ("rows of like length", 48)):
        actor = lay_out(Actor(run_config(model_of("Qwen2"), tokens_per_microbatch=tokens), one_rank), layout)
        passes = passes_of(actor)
        actor.accumulate(batch)
        assert sum(len(part.samples) for part in passes) == len(batch)
        assert sum(part.counts.sum() for part in passes) == sum(len(sample.tokens) for sample in batch)
        computed.append(sum(part.input_ids.size for part in passes))
        assert_same(gradients(actor), expected)
    assert computed[0] < computed[2], "what branches share is computed once"


def test_log_probs_and_values_are_of_each_tokens_own_branch(one_rank, model_of):
    batch, model = three_branches(5, groups=1), plain(model_of("Llama"))
    actor = Actor(run_config(model_of("Llama")), one_rank)
    found = actor.compute_log_prob(batch, calculate_entropy=True)
    critic = Critic(run_config(model_of("Llama"), critic={"kind": "model"}, advantage={"use": "gae"}), one_rank)
    values = critic.compute_values(batch)
    for sample, ours, spread, value in zip(batch, found.logprobs, found.entropy, values, strict=True):
        assert ours == pytest.approx(naive_logprobs(model, sample).detach().numpy(), abs=2e-5)
        assert len(spread) == len(value) == len(sample.tokens)


def test_a_branch_beyond_the_context_is_named(one_rank, model_of):
    actor = Actor(run_config(model_of("GPT2")), one_rank)
    rows = [(PROMPT, 9, 0), (0, 0, 70), (1, 4, 0), (0, 3, 0)]
    (sample,) = make_episodes(0, groups=1, size=1, rows=rows)
    with pytest.raises(ValueError, match="tokens on one branch of an episode, the model takes 70"):
        actor.check_samples([sample])
    wide = [(PROMPT, 9, 0), (0, 0, 40), (1, 4, 0), (0, 0, 40), (3, 4, 0)]
    actor.check_samples(make_episodes(0, groups=1, size=1, rows=wide))
    (sample,) = make_episodes(0, groups=1, size=1, rows=wide)
    strange = tuple(ids + 61 for ids in sample.tree.observed)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        actor.check_samples([replace(sample, tree=replace(sample.tree, observed=strange))])
    actor.limits = replace(actor.limits, shared=0)
    with pytest.raises(ValueError, match="2 branches needs rows of several lengths in one pass"):
        actor.check_samples(make_episodes(0, groups=1, size=1, rows=[(PROMPT, 3, 0), (PROMPT, 2, 0)]))


# ---- returns


def test_return_to_go_by_hand():
    """The reward of a tool's answer counts for the call; that of a branch for what it continues, and not beside it."""
    rows = [(PROMPT, 1, 0), (0, 0, 2), (1, 2, 0), (1, 1, 0), (3, 0, 2), (NOTHING, 0, 1), (5, 2, 0)]
    tree = tree_of(rows, RANDOM, [0.5, 1.0, 2.0, None, 8.0, 16.0, 32.0])
    assert return_to_go(tree).tolist() == [0.5 + 1 + 2 + 8, 2, 2, 8, 32, 32]
    assert return_to_go(tree_of(rows, RANDOM)) is None


def data_of(*samples, rewards, **more):
    batch = [
        replace(make_episodes(0, groups=1, size=1, rows=rows)[0], tree=tree_of(rows, RANDOM, turn_rewards))
        for rows, turn_rewards in samples
    ]
    return replace(group_data([replace(one, reward=r) for one, r in zip(batch, rewards, strict=True)]), **more)


TWO = [(PROMPT, 1, 0), (0, 0, 2), (1, 1, 0)]


def advantages(data: GroupData, use="dr_grpo", **learner):
    config = LearnerConfig.model_validate({"advantage": {"use": use, **({"args": learner} if learner else {})}})
    return [array.tolist() for array in Estimator.of(config)(data)]


def test_a_sample_in_three_branches_counts_once_in_the_baseline():
    """miles issue 2378: rewards [1, 1, 1, 0] would give a baseline of .75."""
    forked = [(PROMPT, 1, 0), (0, 0, 1), (1, 1, 0), (1, 2, 0), (1, 3, 0)]
    data = data_of((forked, []), (TWO, []), rewards=[1, 0])
    assert advantages(data) == [[0.5] * 7, [-0.5] * 2]


def test_the_baseline_of_returns_is_over_samples():
    # Returns of tokens: [1 + 3, 1 + 2] and [0 + 1, 0]; means 3.5 and .5, baseline 2.
    data = data_of((TWO, [1, 0, 2]), (TWO, [1, None, 0]), rewards=[1, 0])
    assert advantages(data) == [[2, 1], [-1, -2]]
    # Against the mean of the other one: .5 and 3.5.
    assert advantages(data, "rloo") == [[3.5, 2.5], [-2.5, -3.5]]
    # Variance between 4.5, within .25 for both.
    scale = np.sqrt(4.75) + 1e-6
    for ours, theirs in zip(advantages(data, "grpo"), [[2, 1], [-1, -2]], strict=True):
        assert ours == pytest.approx(np.asarray(theirs) / scale, rel=1e-9)


def test_another_turn_pays_nothing_for_itself():
    """verl issue 7244: all get .1 for each turn; who makes one more gets more, and nothing is taken off per turn."""
    longer = [*TWO, (2, 0, 2), (3, 1, 0)]
    data = data_of((TWO, [0.1, None, 0.1]), (longer, [0.1, None, 0.1, None, 0.1]), rewards=[0, 0])
    # Means of the returns .15 and .2, baseline .175.
    first, second = advantages(data)
    assert first == pytest.approx([0.025, -0.075])
    assert second == pytest.approx([0.125, 0.025, -0.075])
    assert sum(np.mean(array) for array in (first, second)) == pytest.approx(0, abs=1e-12)


def test_one_response_is_not_its_own_baseline_and_equal_returns_give_exactly_zero():
    assert advantages(data_of((TWO, [1, None, 2]), rewards=[1])) == [[0, 0]]
    same = [(PROMPT, 1, 0), (0, 1, 0), (1, 1, 0)], [None, None, 0.1]
    for use in ("dr_grpo", "grpo", "rloo", "opo", "gpg"):
        assert advantages(data_of(same, same, rewards=[0.3, 0.3]), use) == [[0] * 3] * 2


# ---- generalized advantages


def test_gae_goes_from_the_end_of_an_action_to_the_start_of_the_next():
    """Two actions of 2 and 1 tokens with an observation between; gamma .9, lam .5, the tool's answer gave .25."""
    rows = [(PROMPT, 2, 0), (0, 0, 7), (1, 1, 0)]
    data = data_of((rows, [None, 0.25]), rewards=[1], values=[np.asarray([1.0, 2.0, 3.0])])
    last = 1 - 3
    middle = 0.25 + 0.9 * 3 - 2 + 0.45 * last
    first = 0.9 * 2 - 1 + 0.45 * middle
    (found,) = generalized(data, 0.9, 0.5)
    assert found == pytest.approx([first, middle, last], rel=1e-12)


def generalized(data, gamma, lam):
    return gae(data, gamma=gamma, lam=lam)


def test_gae_follows_each_branch_and_adds_up_to_the_return():
    """The first branch goes on from the fork; the last token of the second one is followed by nothing."""
    rows = [(PROMPT, 1, 0), (0, 0, 2), (1, 1, 0), (1, 1, 0), (3, 0, 1), (4, 1, 0)]
    values = [np.asarray([1.0, 2.0, 4.0, 8.0])]
    (found,) = generalized(data_of((rows, []), rewards=[1], values=values), 1.0, 0.0)
    assert found == pytest.approx([2 - 1, 1 - 2, 8 - 4, 1 - 8])
    rewards = [None, 0.5, 2, None, 4, 8]
    data = data_of((rows, rewards), rewards=[1], values=[np.zeros(4)])
    (found,) = generalized(data, 1.0, 1.0)
    assert found == pytest.approx(1 + return_to_go(tree_of(rows, RANDOM, rewards)))


def test_a_step_with_a_critic_learns_from_episodes(one_rank, model_of):
    """Both updates, collected, with values and returns of every token of every branch."""
    learner = {"critic": {"kind": "model"}, "advantage": {"use": "gae"}, "passes": 2}
    config = run_config(model_of("Qwen2"), **learner)
    actor, critic = Actor(config, one_rank), Critic(config, one_rank)
    worker = worker_of(actor, collected=True, critic=critic)
    batch = three_branches(3, groups=2)
    assert worker.train([0, 1], batch)
    stats = worker.apply(sum(len(sample.tokens) for sample in batch), len(batch))
    assert not stats.skipped
    assert stats.updates == len(stats.critic) == 2
    assert stats.trained.tokens == 2 * sum(len(sample.tokens) for sample in batch)


# ---- groups


def episode_sample(**changes):
    turns = [
        Turn(parent=PROMPT, sampled=2, model_seconds=0.5, reward=0.25),
        Turn(
            parent=0,
            role="tool",
            observed=wire.pack_int32([7, 8]),
            tools=[
                ToolUse(name="a", outcome="ok"),
                ToolUse(name="b", outcome="unknown"),
                ToolUse(name="a", outcome="timeout"),
            ],
            tool_seconds=2.0,
        ),
        Turn(parent=1, sampled=1, cached=3),
        Turn(parent=0, role="user", observed=wire.pack_int32([9])),
        Turn(parent=3, sampled=1, finish="stop"),
    ]
    values = {
        "tokens": wire.pack_int32([1, 2, 3, 4]),
        "logprobs": wire.pack_float32([-1] * 4),
        "runs": [(0, 3), (2, 5), (3, 3)],
        "turns": turns,
        "stop": "completed",
        "replayed": 1,
        "restarts": 2,
    }
    return wire.Sample(v=2, finish="stop", **values | changes)


def test_a_group_of_episodes_is_opened_with_ages_of_each_token_and_its_figures():
    steps = {3: 10, 5: 20}.__getitem__
    group = opened((episode_sample(), 1.0), (episode_sample(stop=None), 0.0), prompt=(5, 6, 7), step_of=steps)
    first = group.samples[0]
    assert first.steps.tolist() == [10, 10, 20, 10]
    assert group.staleness(21) == {11: 6, 1: 2}
    assert first.tree is not None
    assert (first.advantages > 0).all()
    assert (first.advantages[:2] > first.advantages[2:]).all(), "the reward of turn 0 is for it alone"
    assert (first.width, first.cost) == (3 + 2 + 2, 3 + 2 + 2 + 1)
    assert not group.zero_variance
    line = group.episodes.line()
    assert line == {
        "episodes": 2,
        "turns_per_sample": 3,
        "branches_per_sample": 2,
        "stops": {"completed": 1, "unknown": 1},
        "observed_fraction": 3 / 7,
        "cached_fraction": 3 / (3 + 7 + 6),
        "turn_reward_mean": 0.25,
        "model_seconds_per_sample": 0.5,
        "tool_seconds_per_sample": 2.0,
        "tool_calls": 6,
        "tool_failures": 2,
        "tool_unknown": 2,
        "replayed_turns": 2,
        "restarted_episodes": 4,
    }
    stats = StepStats.of([], kl_coefficient=0)
    assert line.items() <= StepMeter().line([group], stats, 21, [], []).items()
    assert "episodes" not in StepMeter().line([opened((single(), 1.0))], stats, 1, [], [])


def test_a_step_has_figures_of_the_last_groups_of_each_source():
    meter, stats = StepMeter(), StepStats.of([], kl_coefficient=0)

    def group(source, *rewards):
        return replace(opened(*((single(), reward) for reward in rewards)), source=source)

    def sources(*seen):
        return meter.line([opened((single(), 1.0))], stats, 1, [], seen)["sources"]

    assert sources(group("", 1.0)) == {}, "prompts without a source have no figures of their own"
    first = sources(group("math", 1.0, 0.0), group("math", 1.0, 1.0), group("code", 0.5))
    assert first == {
        "math": {"groups": 2, "reward_mean": 0.75, "zero_variance": 0.5, "length": 1.0},
        "code": {"groups": 1, "reward_mean": 0.5, "zero_variance": 1.0, "length": 1.0},
    }
    assert sources() == first, "a source without a new group keeps its figures"
    last = sources(*(group("math", 0.0, 0.5) for _ in range(64)))
    assert last["math"] == {"groups": 66, "reward_mean": 0.25, "zero_variance": 0.0, "length": 1.0}
    assert len(sources(*(group(f"s{n}", 1.0) for n in range(40)))) == 17
    assert sources()["other"]["groups"] == 40 - 14


def test_a_learner_says_in_its_heartbeat_how_long_it_waits_and_how_long_a_step_takes():
    meter, stats = StepMeter(), StepStats.of([], kl_coefficient=0)
    meter.begin()
    assert meter.shown().keys() == {"stepped"}
    took = [meter.line([opened((single(), 1.0))], stats, step, [], [])["step_seconds"] for step in range(1, 4)]
    shown = meter.shown()
    assert (shown["step_seconds"], shown["waits"]) == (round(max(took), 3), 1.0), "torch did nothing"
    assert shown["tokens_per_second"] > 0


@pytest.mark.parametrize(("every", "usual"), [(30, 40.0), (1, 1.0)])
def test_a_step_usually_takes_as_long_as_one_with_a_checkpoint(monkeypatch, every, usual):
    now = [1.0]
    monkeypatch.setattr("streamrl.learner.metrics.time.monotonic", lambda: now[0])
    meter, stats = StepMeter(every), StepStats.of([], kl_coefficient=0)
    meter.begin()
    for step, seconds in enumerate([40.0, *25 * [1.0]], 1):
        now[0] += seconds
        meter.line([opened((single(), 1.0))], stats, step, [], [])
    assert meter.shown()["step_seconds"] == usual


def single():
    return wire.Sample(tokens=wire.pack_int32([4]), logprobs=wire.pack_float32([-1]), runs=[(0, 3)], finish="stop")


def test_equal_rewards_are_a_contrast_where_turns_have_others():
    def group(*rewards):
        turns = [[Turn(parent=PROMPT, sampled=4, reward=reward)] for reward in rewards]
        return opened(*((episode_sample(turns=each, runs=[(0, 3)]), 1.0) for each in turns))

    assert not group(0.5, 0.0).zero_variance
    equal = group(0.5, 0.5)
    assert equal.zero_variance
    assert equal.zero_gradient


def test_an_episode_beyond_the_context_is_a_dead_letter_with_its_reason(one_rank, model_of):
    actor = Actor(run_config(model_of("GPT2")), one_rank)
    long = Turn(parent=0, role="tool", observed=wire.pack_int32([3] * 80))
    turns = [Turn(parent=PROMPT, sampled=3), long, Turn(parent=1, sampled=1)]
    with pytest.raises(Unusable, match="group 9 cannot be trained: group 9: 85 tokens on one branch of an episode"):
        opened((episode_sample(turns=turns, runs=[(0, 3)]), 1.0), check=actor.check_samples)


def test_an_episode_without_a_sampled_token_has_no_gradient():
    empty = {"tokens": b"", "logprobs": b"", "runs": [], "turns": [Turn(observed=wire.pack_int32([1]), reward=1.0)]}
    group = opened((episode_sample(**empty), 0.0), (single(), 1.0))
    assert group.responses == 1
    assert [len(sample.advantages) for sample in group.samples] == [0, 1]
