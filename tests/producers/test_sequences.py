"""Batches of sequences: every array against hand-made ones, and against plain forward passes of a real model."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from producer_kit import tiny_model, until

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, DataError
from streamrl.producers.engines import Completion, make_engine
from streamrl.producers.sequences import PromptBatch, generate_sequences, pad
from streamrl.weight_sync.tensors import Version


def completion(tokens, runs, finish="length"):
    return Completion(
        np.asarray(tokens, np.int32), np.asarray([-t / 8 for t in tokens], np.float32), runs, finish, 1, 0.0
    )


def test_every_array_is_what_it_says():
    batch = PromptBatch(
        prompts=np.asarray([[7, 7, 5], [1, 2, 3]]),
        attention_mask=np.asarray([[0, 0, 1], [1, 1, 1]]),
        samples=2,
        max_new_tokens=4,
        pad=99,
    )
    made = pad(
        batch,
        [
            completion([4, 8], [(0, 3)], "stop"),
            completion([], [], "abort"),
            completion([1, 2, 3, 4], [(0, 3), (1, 5), (3, 6)]),
            completion([6], [(0, 1)], "abort"),
        ],
    )
    assert made.prompts.tolist() == [[99, 99, 5], [99, 99, 5], [1, 2, 3], [1, 2, 3]]
    assert made.responses.tolist() == [[4, 8, 99, 99], [99] * 4, [1, 2, 3, 4], [6, 99, 99, 99]]
    assert made.input_ids[0].tolist() == [99, 99, 5, 4, 8, 99, 99]
    assert made.attention_mask[0].tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert made.position_ids.tolist() == [
        [0, 0, 0, 1, 2, 3, 4],
        [0, 0, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    assert made.response_mask.tolist() == [[1, 1, 0, 0], [0] * 4, [1] * 4, [1, 0, 0, 0]]
    assert made.rollout_log_probs.tolist() == [
        [-0.5, -1.0, 0, 0],
        [0] * 4,
        [-0.125, -0.25, -0.375, -0.5],
        [-0.75, 0, 0, 0],
    ]
    assert made.versions.tolist() == [[3, 3, -1, -1], [-1] * 4, [3, 5, 5, 6], [1, -1, -1, -1]]
    assert made.finishes == ("stop", "abort", "length", "abort")


@given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(1, 7))
def test_masks_positions_and_sums_hold_for_any_batch(data, rows, width, samples, length):
    real = data.draw(npst.arrays(np.int64, rows, elements=st.integers(1, width)))
    mask = (np.arange(width)[None] >= width - real[:, None]).astype(np.int64)
    prompts = data.draw(npst.arrays(np.int64, (rows, width), elements=st.integers(1, 50)))
    lengths = data.draw(st.lists(st.integers(0, length), min_size=rows * samples, max_size=rows * samples))
    batch = PromptBatch(prompts, mask, samples, length)
    made = pad(batch, [completion(range(1, n + 1), [(0, 1)] if n else []) for n in lengths])
    assert made.response_mask.sum(axis=1).tolist() == lengths
    assert (made.attention_mask[:, width:] == made.response_mask).all()
    assert ((made.versions >= 0) == (made.response_mask == 1)).all()
    assert (made.rollout_log_probs[made.response_mask == 0] == 0).all()
    for row in range(rows * samples):
        kept = made.attention_mask[row] == 1
        assert made.position_ids[row][kept].tolist() == list(range(kept.sum()))
        assert made.input_ids[row][kept][: real[row // samples]].tolist() == (
            prompts[row // samples][width - real[row // samples] :].tolist()
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "greedy"),
        ({"samples": 0}, "samples"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"attention_mask": np.asarray([[1, 0]])}, "padding on the left"),
        ({"attention_mask": np.asarray([[2, 1]])}, "padding on the left"),
        ({"attention_mask": np.asarray([[1, 1, 1]])}, "do not form a batch"),
        ({"prompts": np.zeros((0, 2), int), "attention_mask": np.zeros((0, 2), int)}, "do not form a batch"),
        ({"attention_mask": np.asarray([[0, 0]])}, "empty"),
    ],
)
async def test_a_batch_without_sense_is_refused(changes, message):
    given_ = {"prompts": np.asarray([[1, 2]]), "attention_mask": np.asarray([[1, 1]])} | changes
    with pytest.raises(ConfigError, match=message):
        await generate_sequences(None, PromptBatch(**given_))


def test_completions_that_do_not_fit_are_refused():
    batch = PromptBatch(np.asarray([[1]]), np.asarray([[1]]), max_new_tokens=2)
    for wrong in ([], [completion([1, 2, 3], [(0, 1)])]):
        with pytest.raises(ConfigError, match="do not fit"):
            pad(batch, wrong)


@pytest.fixture
async def engine(tiny_dir):
    torch.set_num_threads(1)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_dir), "context": 512},
            "engine": {"decode": "slots", "slots": 8, "threads": 1, "device": "cpu"},
        }
    )
    made = make_engine(config, 3)
    await made.start()
    yield made
    await made.close()


PROMPTS = np.asarray([[0, 0, 65, 66], [70, 71, 72, 73], [0, 80, 81, 82]])
MASK = np.asarray([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


async def test_log_probabilities_are_those_of_a_plain_forward_pass_over_the_padded_arrays(engine):
    model = tiny_model(5).eval()
    await engine.apply(Version((1, 4), 4, dict(model.named_parameters())))
    batch = PromptBatch(PROMPTS, MASK, samples=4, max_new_tokens=10, temperature=0.7)
    made = await generate_sequences(engine, batch)
    with torch.no_grad():
        logits = model(
            input_ids=torch.from_numpy(made.input_ids),
            attention_mask=torch.from_numpy(made.attention_mask),
            position_ids=torch.from_numpy(made.position_ids),
        ).logits[:, 3:-1]
    expected = (logits / 0.7).log_softmax(-1).gather(2, torch.from_numpy(made.responses)[..., None])[..., 0]
    np.testing.assert_allclose(made.rollout_log_probs, expected.numpy(), atol=2e-4)
    assert (made.versions == 4).all()
    assert len({tuple(row) for row in made.responses.tolist()}) == 12


@pytest.mark.parametrize("on_abort", ["keep", "continue"])
async def test_a_batch_that_is_aborted_gives_what_there_is_or_goes_on(engine, on_abort):
    batch = PromptBatch(PROMPTS[:1], MASK[:1], samples=3, max_new_tokens=400)
    task = asyncio.create_task(generate_sequences(engine, batch, on_abort=on_abort))
    await until(lambda: engine.load().tokens_sampled > 30)
    assert await engine.abort() == 3
    made = await task
    lengths = made.response_mask.sum(axis=1)
    assert made.finishes == (("abort",) * 3 if on_abort == "keep" else ("length",) * 3)
    assert (lengths < 400).all() if on_abort == "keep" else (lengths == 400).all()
    assert (lengths > 0).all()


async def test_one_bad_prompt_ends_the_batch_with_its_own_error(engine):
    prompts = np.asarray([[65, 66], [65, 9999]])
    with pytest.raises(DataError, match="vocabulary"):
        await generate_sequences(engine, PromptBatch(prompts, np.ones_like(prompts), max_new_tokens=400))
    await until(lambda: engine.load().running == 0)
