"""A second model has to read what the policy reads."""

import logging
import shutil

import pytest
from tiny_policy import run_config
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from streamrl.errors import ConfigError
from streamrl.learner.critic import make_critic
from streamrl.learner.policy import Actor
from streamrl.learner.reference import make_reference

LETTERS = "Twoplus34ihry-x;naïve?ĠÂ"
"""What a text is made of, byte by byte, in the form in which transformers loads the tokenizer of any Qwen2 model."""


@pytest.fixture
def model(model_of, tmp_path):
    """A copy of the model with a tokenizer that knows the letters in this order; without letters it has none."""

    def make(name, order):
        folder = tmp_path / name
        shutil.copytree(model_of("Qwen2"), folder)
        if not order:
            return folder
        vocabulary = {"<pad>": 0} | {letter: place for place, letter in enumerate(order, start=1)}
        Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token="<pad>", pad_token="<pad>").save_pretrained(folder)
        return folder

    return make


def critic_of(policy, path, ranks):
    config = run_config(policy, advantage={"use": "gae"}, critic={"kind": "model", "path": str(path)})
    return make_critic(config, ranks, Actor(config, ranks))


def reference_of(policy, path, ranks):
    config = run_config(policy, reference={"kind": "frozen", "path": str(path)})
    return make_reference(config, ranks, Actor(config, ranks))


@pytest.mark.parametrize("of", [critic_of, reference_of])
def test_another_tokenizer_is_refused_and_the_same_one_or_none_is_taken(model, one_rank, of, caplog):
    policy, same, other = model("policy", LETTERS), model("same", LETTERS), model("other", LETTERS[::-1])
    with pytest.raises(ConfigError, match=r"learner\.(critic|reference)\.path .* has another tokenizer"):
        of(policy, other, one_rank)
    assert of(policy, same, one_rank) is not None
    caplog.set_level(logging.INFO, "streamrl.learner.sharding")
    assert of(policy, model("bare", ""), one_rank) is not None
    [record] = [record for record in caplog.records if record.message == "tokenizers not compared"]
    assert record.reason == "it has none"


@pytest.mark.parametrize("of", [critic_of, reference_of])
def test_shorter_sequences_and_fewer_tokens_are_refused(model_of, one_rank, of, tmp_path):
    with pytest.raises(ConfigError, match="takes 70 tokens, the policy 128"):
        of(model_of("Qwen2"), model_of("GPT2"), one_rank)
    small = tmp_path / "small"
    model = AutoModelForCausalLM.from_pretrained(model_of("Llama"))
    model.resize_token_embeddings(40)
    model.save_pretrained(small)
    with pytest.raises(ConfigError, match="knows 40 tokens, the policy 61"):
        of(model_of("Llama"), small, one_rank)
