"""Every loss and aggregation through the real actor: order, padding, packing and micro-batches do not matter."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from step_kit import estimated, rewarded
from tiny_policy import lay_out, run_config, without_key_biases

from streamrl.learner.algorithms.losses import LOSSES
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.batch import sizes
from streamrl.learner.policy import Actor

AGGREGATES = ("token_mean", "sequence_mean", "constant_length", "prompt_mean")
BASES = ("decoupled", "bypass", "prox_approx")
PAIRS = [
    (loss, aggregate, BASES[(row + column) % 3])
    for row, loss in enumerate(name for name in LOSSES.names if name != "kl_cov")
    for column, aggregate in enumerate(AGGREGATES)
    if column < 3 or row < 3
]
"""Every two of loss, aggregate and base meet; prompt_mean has three losses. kl_cov looks at a micro-batch."""
LAYOUTS = {
    "one by one": ({"tokens_per_microbatch": 16}, "apart"),
    "alone": ({}, "alone"),
    "small micro-batches": ({"tokens_per_microbatch": 96}, "rows of like length"),
    "packed": ({}, "packed"),
    "small chunks of logits": ({"logprob_chunk": 7}, "rows of like length"),
}


@pytest.fixture(scope="module")
def made(one_rank, model_of):
    """One actor per layout, and a step whose proximal policy is not the present one."""
    plain = Actor(run_config(model_of("Qwen2")), one_rank)
    actors = [
        lay_out(Actor(run_config(model_of("Qwen2"), **options), one_rank), layout)
        for options, layout in LAYOUTS.values()
    ]
    batch = estimated(rewarded(0, near=plain), plain)
    random = np.random.default_rng(0)
    batch = [
        replace(sample, proximal=(sample.logprobs + 0.1 * random.normal(size=len(sample.tokens))).astype(np.float32))
        for sample in batch
    ]
    return SimpleNamespace(plain=plain, layouts=dict(zip(LAYOUTS, actors, strict=True)), batch=batch)


def gradient(actor, batch, recipe, step=10):
    """Gradient of the step, and its sums."""
    actor.recipe = recipe
    actor.accumulate(batch, step=step)
    tokens, responses = sizes(batch)
    scale = 1 / recipe.normaliser(tokens=tokens, responses=responses)
    found = {name: parameter.grad.to_local() * scale for name, parameter in actor.parameters.items()}
    sums = actor._sums.clone()
    actor.discard()
    return without_key_biases(found), sums


@pytest.mark.parametrize(("loss", "aggregate", "base"), PAIRS)
def test_the_layout_of_a_step_does_not_matter(made, loss, aggregate, base):
    correction = {
        "base": base,
        "gates": [{"use": "tis"}, {"use": "mask", "level": "geometric", "low": 0.9, "high": 1.1}],
    }
    if base == "bypass":
        correction["gates"] = correction["gates"][1:]
    config = made.plain.config.model_dump()
    config["learner"] |= {
        "loss": {"use": loss, "aggregate": aggregate, "entropy": 0.01},
        "correction": correction,
    }
    recipe = Recipe.of(type(made.plain.config).model_validate(config))
    expected, sums = gradient(made.plain, made.batch, recipe)
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    assert scale > 0
    orders = (np.random.default_rng(1).permutation(len(made.batch)), np.arange(len(made.batch))[::-1])
    shuffled = [[made.batch[place] for place in order] for order in orders]
    for place, actor in enumerate((made.plain, *made.layouts.values())):
        found, other = gradient(actor, shuffled[place % 2], recipe)
        torch.testing.assert_close(other, sums, rtol=1e-4, atol=1e-4)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5 * scale, msg=name)
