"""EGPO: its three modes by hand, and what it must never do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from streamrl.config import ModelConfig
from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.advantages import Estimator, GroupData, TokenTexts
from streamrl.learner.algorithms.egpo import confidence_weights, mean_uncertainty, part_of
from streamrl.runfile import load


def advantages(rewards, surprisals, *, entropy=None, texts=None, prompt_text="", **args):
    """First token's advantage of each response; `surprisals` are negative log-probabilities per response."""
    data = GroupData(
        np.asarray(rewards, dtype=np.float64),
        np.asarray([len(tokens) for tokens in surprisals]),
        [-np.asarray(values) for values in surprisals],
        entropy=entropy,
        texts=texts,
        prompt_text=prompt_text,
    )
    config = LearnerConfig.model_validate({"advantage": {"use": "egpo", "args": args}})
    return [tokens[0] for tokens in Estimator.of(config)(data)]


def ratio(rewards, surprisals, **args):
    return advantages(rewards, surprisals, mode="ratio", **args)


# GRPO of 0, 0, 1, 1: -+ .5 / std, std = sqrt(1 / 3)
GRPO = 0.5 / (np.sqrt(1 / 3) + 1e-6)


def test_ratio_mode_weighs_the_confident_more_right_or_wrong():
    # H = 1, 3, 2, 2 with mean 2: weights 2, 2/3, 1, 1
    found = ratio([0, 0, 1, 1], [[0.5, 1.5], [3.0], [2.0, 2.0], [1, 2, 3]])
    assert found == pytest.approx([-2 * GRPO, -GRPO * 2 / 3, GRPO, GRPO], rel=1e-5)


def test_ratio_mode_is_clipped():
    found = ratio([0, 1], [[0.0], [10.0]], lambda_min=0.6, lambda_max=1.5)
    plain = ratio([0, 1], [[1.0], [1.0]])
    assert found == pytest.approx([plain[0] * 1.5, plain[1] * 0.6], rel=1e-5)


def test_the_group_mean_is_over_all_of_the_group():
    # One response more, whose advantage plays no part, moves the weights of the others.
    few = confidence_weights(np.asarray([1.0, 1.0]), lambda_min=0.1, lambda_max=10)
    many = confidence_weights(np.asarray([1.0, 1.0, 4.0]), lambda_min=0.1, lambda_max=10)
    assert few == pytest.approx([1, 1], rel=1e-5)
    assert many == pytest.approx([2, 2, 0.5], rel=1e-5)


def test_equal_confidence_is_plain_grpo():
    assert ratio([0, 0, 1, 1], [[1.0]] * 4) == pytest.approx([-GRPO, -GRPO, GRPO, GRPO], rel=1e-5)
    assert ratio([0, 0, 1, 1], [[0.0]] * 4) == pytest.approx([-GRPO, -GRPO, GRPO, GRPO], rel=1e-12)


THOUGHT = ["Hm", "<think>", "a", "b", "</think>", "4", "2"]
"""The text of each token: two are thought, two are the answer."""


def test_parts_are_between_the_tags_and_behind_them():
    values = [[9.0, 9.0, 1.0, 3.0, 9.0, 5.0, 7.0], [1.0, 2.0]]
    texts = [THOUGHT, ["4", "2"]]
    assert mean_uncertainty(values).tolist() == [43 / 7, 1.5]
    thinking, answer = (
        mean_uncertainty(values, [part_of(each, part) for each in texts]) for part in ("thinking", "answer")
    )
    assert (thinking[0], answer[0]) == (2, 6)
    assert np.isnan([thinking[1], answer[1]]).all(), "without tags there is neither"
    assert confidence_weights(thinking, lambda_min=0.5, lambda_max=2)[1] == 1
    found = ratio([0, 1], values, texts=texts, part="answer")
    assert found == pytest.approx(ratio([0, 1], [[1.0], [1.0]]), rel=1e-5)


@pytest.mark.parametrize(
    ("texts", "prompt", "thought"),
    [
        (THOUGHT, "", [2, 3]),
        # Tags in pieces, as tokenizers without special tokens for them have it; what is glued to a tag is no thought.
        (["<", "think", ">\n", "a", " b", "</", "think", ">4"], "", [3, 4]),
        (["<think>a", "b", "c</think>"], "", [1]),
        # Chat templates that open the thinking.
        (["a", "b", "</think>", "4"], "2 + 2?<think>\n", [0, 1]),
        (["\n", "<think>", "b", "</think>", "4"], "2 + 2?<think>", [2]),
        (["a", "<think>", "b", "</think>", "4"], "2 + 2?<think>", [0, 1, 2]),
        # A prompt that only mentions the tag has begun nothing.
        (["Sure. ", "<think>", "a", "b", "</think>", "x"], "Begin with <think>.\nAssistant:", [2, 3]),
        (["a plain ", "answer", "</think>"], "Begin with <think>.\nAssistant:", None),
        # Those that open and close it: nothing is thought.
        (["a", "b"], "2 + 2?<think>\n\n</think>", None),
        (["a", "</think>", "4"], "2 + 2?", None),
        # Cut off before its end.
        (["<think>", "a", "b"], "", None),
        (["a", "b"], "<think>", None),
        (["<think>", "</think>", "4"], "", []),
        (["</think>", "a", "<think>", "b", "</think>", "<think>", "c", "</think>"], "", [3]),
        ([], "", None),
    ],
)
def test_what_is_thought(texts, prompt, thought):
    found = part_of(texts, "thinking", prompt)
    assert found.shape == (len(texts),)
    assert np.flatnonzero(found).tolist() == (thought or [])
    if thought is None:
        assert not part_of(texts, "answer", prompt).any()


def test_the_preset_is_that_of_the_paper():
    """By hand: A of 0, 0, 1, 1 is -+ .866; plus .4 of the mean entropy between the tags, which is cut at A / 2."""
    args = load(None, ["learner.preset=egpo"], {}).config.learner.advantage.args
    entropy = [[8.0, 8.0, 0.1, 0.3, 8.0, 8.0, 8.0], [8.0] * 7, [8.0, 8.0, 2.0, 4.0, 8.0, 8.0, 8.0], [8.0, 8.0]]
    texts = [THOUGHT, ["a"] * 7, THOUGHT, ["4", "2"]]
    found = advantages([0, 0, 1, 1], [[1.0] * len(each) for each in texts], entropy=entropy, texts=texts, **args)
    assert found == pytest.approx([-GRPO + 0.4 * 0.2, -GRPO, GRPO + 0.4 * GRPO / 2, GRPO], rel=1e-12)
    assert found == pytest.approx([-0.78603, -0.86603, 1.03923, 0.86603], abs=1e-5)


def test_of_two_successes_it_prefers_the_one_that_thought_more_freely():
    """The ratio form, whose preset is `egpo_zhao`, prefers the other one."""
    entropy = [[8.0, 8.0, each, each, 8.0, 8.0, 8.0] for each in (0.2, 0.2, 0.1, 0.3)]
    texts = [THOUGHT] * 4
    for preset, prefers_free in (("egpo", True), ("egpo_zhao", False)):
        args = load(None, [f"learner.preset={preset}"], {}).config.learner.advantage.args
        found = advantages([0, 0, 1, 1], entropy, entropy=entropy, texts=texts, **args)
        assert (found[3] > found[2]) == prefers_free


def test_without_arguments_it_is_the_preset():
    assert Estimator.of(LearnerConfig.model_validate({"advantage": {"use": "egpo"}})).needs == {"entropy", "text"}
    preset = load(None, ["learner.preset=egpo"], {}).config.learner
    assert (preset.kl.where, preset.reference.kind) == ("loss", "frozen")
    assert preset.kl.coefficient == 0.001


def test_the_text_of_a_token_is_that_of_the_tokenizer(tmp_path):
    """One tag in pieces, the other a special token, and bytes that are no character by themselves."""
    vocabulary = {letter: place for place, letter in enumerate("<think>ab\u00c3\u00a9")}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</think>")])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    texts = TokenTexts(ModelConfig(path=str(tmp_path)))
    texts.load()
    found = texts(np.asarray([*range(11), 11, 7], dtype=np.int32))
    assert "".join(found[:9]) == "<think>ab"
    assert found[9:] == ["\ufffd", "\ufffd", "</think>", "a"]
    assert np.flatnonzero(part_of(found, "thinking")).tolist() == [7, 8, 9, 10]
    with pytest.raises(ConfigError, match="no tokenizer"):
        TokenTexts(ModelConfig(path=str(tmp_path / "nothing"))).load()


def test_bonus_mode_adds_entropy_within_a_share_of_the_advantage():
    # |A| / 2 = .433: an entropy of .1 is added whole, one of 5 is cut.
    surprisals = [[1.0]] * 4
    found = advantages([0, 0, 1, 1], surprisals, mode="bonus", part="joint", entropy=[[0.1], [5.0], [0.1], [5.0]])
    expected = [-GRPO + 0.4 * 0.1, -GRPO + 0.4 * GRPO / 2, GRPO + 0.4 * 0.1, GRPO + 0.4 * GRPO / 2]
    assert found == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match="needs entropy"):
        advantages([0, 1], surprisals[:2], mode="bonus", part="joint")


def test_asymmetric_mode_leaves_successes_alone():
    # H = 1, 3, 1, 3, mean 2: weights 2, 2/3; only the confident failure is weighed.
    found = advantages([0, 0, 1, 1], [[1.0], [3.0], [1.0], [3.0]], mode="asymmetric")
    assert found == pytest.approx([-2 * GRPO, -GRPO, GRPO, GRPO], rel=1e-5)


def test_asymmetric_mode_tells_failures_apart():
    found = advantages([0, 0], [[1.0], [3.0]], mode="asymmetric", degenerate=0.3)
    # weights 2 and 2/3, mean 4/3
    assert found == pytest.approx([-0.2, 0.2], rel=1e-5)
    assert advantages([1, 1], [[1.0], [3.0]], mode="asymmetric") == [0, 0]
    assert advantages([0, 0], [[1.0], [3.0]], mode="asymmetric", degenerate=0.0) == [0, 0]
    assert advantages([0], [[1.0]], mode="asymmetric") == [0]
    assert advantages([-1, -1], [[1.0], [3.0]], mode="asymmetric", wrong=-2.0) == [0, 0]


responses = st.lists(
    st.tuples(st.integers(-3, 3), st.lists(st.floats(0, 1000), min_size=1, max_size=4)), min_size=1, max_size=6
)


@given(responses, st.sampled_from(["ratio", "bonus", "asymmetric"]))
def test_no_sign_ever_flips_and_all_is_bounded(drawn, mode):
    rewards, surprisals = zip(*drawn, strict=True)
    found = np.asarray(
        advantages(rewards, surprisals, entropy=list(surprisals), mode=mode, part="joint", degenerate=0.0)
    )
    plain = np.asarray(advantages(rewards, [[1.0]] * len(rewards), mode="ratio"))
    assert np.all(np.isfinite(found))
    assert np.all(np.sign(found) == np.sign(plain))
    assert np.all(np.abs(found) <= 2 * np.abs(plain) * 1.001)
