"""Whatever stands beside a response, its log-probabilities are those of it alone; models that cannot are refused."""

import logging

import numpy as np
import pytest
import torch
from tiny_policy import KINDS, VOCABULARY, lay_out, make_model, passes_of, run_config, train_sample
from transformers import AutoModelForCausalLM

from streamrl.errors import ConfigError
from streamrl.learner.critic import Critic
from streamrl.learner.model_loading import load_rows
from streamrl.learner.policy import Actor

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "intermediate_size": 256,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def made(tmp_path):
    """Directory of a model with random weights, large enough that a wrong mask shows."""

    return lambda kind, **values: make_model(kind, tmp_path, std=0.1, **values)


def configure(path, context=512, **learner):
    config = run_config(path, **learner)
    return config.model_copy(update={"model": config.model.model_copy(update={"context": context})})


def responses(*groups):
    """Groups of a prompt of so many tokens, with responses of so many."""
    random = np.random.default_rng(0)
    batch = []
    for group_id, (prompt, *lengths) in enumerate(groups):
        ids = random.integers(3, VOCABULARY, prompt).astype(np.int32)
        for length in lengths:
            tokens = random.integers(3, VOCABULARY, length).astype(np.int32)
            batch.append(train_sample(group_id, ids, tokens, np.zeros(length, dtype=np.float32), 1.0))
    return batch


def check_against_each_alone(path, actor, batch):
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    for sample, found in zip(batch, actor.compute_log_prob(batch).logprobs, strict=True):
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]).astype(np.int64))
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        begin = len(sample.prompt)
        expected = logprobs[begin - 1 : -1].gather(1, ids[begin:, None])[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [256, 16])
def test_local_attention_narrows_the_rows(made, one_rank, window):
    """GPT-Neo masks by places in the row, beside whatever mask it is given."""
    path = made("GPTNeo", **NEO, window_size=window)
    actor = Actor(configure(path), one_rank)
    assert actor.limits.shared == window
    batch = responses((60, *[100] * 8), (20, 30, 7, 50))
    check_against_each_alone(path, actor, batch)
    check_against_each_alone(path, lay_out(actor, "packed"), batch)


def test_a_window_that_no_known_key_names_is_found(made, one_rank, caplog, monkeypatch):
    path = made("GPTNeo", **NEO, window_size=100)
    monkeypatch.setattr("streamrl.learner.rows._WINDOWS", ())
    with caplog.at_level(logging.WARNING):
        actor = Actor(configure(path), one_rank)
    assert actor.limits.shared == 0
    assert "in a pass of its own" in caplog.text
    check_against_each_alone(path, actor, responses((60, 100, 20), (20, 30, 7)))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Bert", SMALL),
        ("Roberta", SMALL),
        (
            "Gemma3Text",
            {
                **SMALL,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": 64,
                "use_bidirectional_attention": True,
            },
        ),
        # Its dynamic mask keeps so many keys of the row, later ones included.
        ("Doge", {**SMALL, "num_key_value_heads": 2, "keep_window_size": 32}),
    ],
)
def test_a_model_that_sees_later_tokens_is_refused(made, one_rank, kind, values):
    with pytest.raises(ConfigError, match="later tokens"):
        Actor(configure(made(kind, **values)), one_rank)


def test_a_rotary_embedding_that_depends_on_the_longest_row_is_refused_beyond_its_length(made, one_rank):
    path = made("Phi3", **SMALL, num_key_value_heads=2, original_max_position_embeddings=64, rope_parameters=LONG)
    with pytest.raises(ConfigError, match="longrope") as caught:
        Actor(configure(path, context=65), one_rank)
    assert "at most 64" in caught.value.hint
    actor = Actor(configure(path, context=64), one_rank)
    assert actor.limits.shared == 128
    check_against_each_alone(path, actor, responses((20, 44, 30, 10), (1, 7)))


@pytest.mark.parametrize(("kind", "values"), [("Bert", SMALL), ("Doge", {**SMALL, "num_key_value_heads": 2})])
def test_what_is_causal_as_it_is_configured_is_taken(made, one_rank, kind, values):
    path = made(kind, **values, **({"is_decoder": True} if kind == "Bert" else {}))
    assert Actor(configure(path), one_rank).limits.shared == 128


@pytest.mark.parametrize("kind", KINDS)
def test_families_that_keep_to_masks_have_the_fast_layout(model_of, one_rank, caplog, kind):
    with caplog.at_level(logging.WARNING, "streamrl.learner.rows"):
        found = Actor(configure(model_of(kind), context=128), one_rank).limits
    assert not [record for record in caplog.records if record.name.startswith("streamrl")]
    assert found.shared == (64 if "sliding_window" in KINDS[kind] else 128)


def test_rows_that_change_each_other_are_computed_one_by_one(model_of, one_rank, caplog, monkeypatch):
    """A model whose embeddings depend on how many rows there are."""

    def load(*args):
        model, rows = load_rows(*args)
        model.get_input_embeddings().register_forward_hook(lambda _, ids, states: states * (0.9 + 0.1 * len(ids[0])))
        return model, rows

    monkeypatch.setattr("streamrl.learner.policy.load_rows", load)
    with caplog.at_level(logging.WARNING):
        actor = Actor(configure(model_of("Llama"), context=128), one_rank)
    assert actor.limits.shared == 0
    assert "in a pass of its own" in caplog.text
    batch = responses((10, 20, 30, 7), (5, 3, 33))
    check_against_each_alone(model_of("Llama"), actor, batch)
    passes = passes_of(actor)
    actor.accumulate(batch)
    assert len(passes) == len(batch)
    assert sum(part.input_ids.size for part in passes) == sum(sample.width for sample in batch)


def fails_with(condition, monkeypatch):
    """Let a model raise an error of its own for such ids."""

    def load(*args):
        model, rows = load_rows(*args)

        def fail(_, ids):
            if condition(ids[0]):
                raise ValueError("rope of another kind")

        model.get_input_embeddings().register_forward_pre_hook(fail)
        return model, rows

    monkeypatch.setattr("streamrl.learner.policy.load_rows", load)


def test_a_model_that_fails_alone_is_refused_with_its_error(model_of, one_rank, monkeypatch):
    fails_with(lambda ids: ids.shape[1] > 100, monkeypatch)
    with pytest.raises(ConfigError, match="fails on a sequence of 128 tokens: ValueError: rope of another") as caught:
        Actor(configure(model_of("Llama"), context=128), one_rank)
    assert "later tokens" not in str(caught.value)


def test_a_model_that_fails_with_several_rows_is_warned_of_with_its_error(model_of, one_rank, monkeypatch, caplog):
    fails_with(lambda ids: len(ids) > 1, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert not Actor(configure(model_of("Llama"), context=128), one_rank).limits.shared
    assert "other responses change the model: ValueError: rope of another kind" in caplog.text


def test_a_critic_is_tried_as_well(made, one_rank):
    config = configure(made("Bert", **SMALL), advantage={"use": "gae"}, critic={"kind": "model"})
    with pytest.raises(ConfigError, match="later tokens"):
        Critic(config, one_rank)
