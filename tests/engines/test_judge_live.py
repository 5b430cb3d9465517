"""A judge on a real vLLM server that streamrl starts: its verdicts are those of a plain forward pass, and one that is
out of bounds is a dead sample and never a number.

The model has random weights and would write anything. Only digits are let through (`logit_bias`), so its verdict is the
digit that it thinks likeliest after the conversation; 0 to 8 are scores, and 9 is out of bounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl import wire
from streamrl.consumers import RewardSample
from streamrl.consumers.models.template import Body
from tests.consumers.samples import prompt, response
from tests.engines import tiny
from tests.engines.critic_kit import SAMPLES, START, TEMPLATE, answer, put, question, scoring, write_run
from tests.queues.ledger_kit import faults, until_async

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(2 * START)]

GROUPS = 12
SEED, OUT = 3, 9
QUESTION = "{prompt} <{fence}> {response} </{fence}> Grade: "
ENDS = "{% if add_generation_prompt %}[assistant]{% endif %}"


class Chat:
    """The same model by transformers alone."""

    def __init__(self, folder: Path) -> None:
        import transformers

        tiny.make_model(folder, SEED)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self._tokenizer.chat_template = TEMPLATE + ENDS
        self._tokenizer.save_pretrained(folder)
        self._model: Any = tiny.build(tiny.random_weights(SEED))
        self.digits: list[int] = self._tokenizer.convert_tokens_to_ids(list("0123456789"))

    @torch.no_grad()
    def grade(self, content: str) -> int:
        """The likeliest digit after a message."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        logits = self._model(input_ids=torch.tensor([ids])).logits[0, -1, self.digits]
        first, second = logits.topk(2).values.tolist()
        assert first - second > 1e-4, "two digits are as likely: another seed would be better"
        return int(logits.argmax())


def asked(group_id: int, sample: int) -> str:
    """What the judge is asked for a sample."""
    seen = RewardSample.of(prompt(text=question(group_id)), response(answer(group_id, sample)))
    return str(Body({"user": QUESTION}).filled(seen)["user"])


async def test_every_sample_has_the_verdict_of_a_forward_pass_or_is_dead_and_none_is_0(tmp_path: Path):
    torch.set_num_threads(1)
    chat = Chat(tmp_path / "critic")
    wanted = {group_id: [chat.grade(asked(group_id, k)) for k in range(SAMPLES)] for group_id in range(GROUPS)}
    grades = [grade for group in wanted.values() for grade in group]
    assert {OUT} < set(grades), "some are out of bounds, and others are not"
    args = {
        "prompt": QUESTION,
        "regex": "([0-9])",
        "bounds": [0, OUT - 1],
        "max_tokens": 1,
        "cut_off": "read",
        "tries": 1,
        "extra": {"logit_bias": {str(token): 100.0 for token in chat.digits}},
    }
    critic = {"kind": "vllm", "task": "chat", "requests_per_minute": 6000}
    config = write_run(tmp_path, {"use": "judge", "name": "judge", "args": args}, critic, replicas=2)
    async with scoring(config, tmp_path / "run") as (_, ledgers):
        train = ledgers.train
        for group_id in range(GROUPS):
            await put(train, group_id)

        async def settled() -> bool:
            dead = {letter.group_id for letter in await train.dead_letters() if letter.sample is None}
            return len(await train.closed()) + len(dead) == GROUPS

        await until_async(settled, 240)
        letters = {(letter.group_id, letter.sample): letter.why for letter in await train.dead_letters()}
        for group_id in await train.closed():
            group = await train.read_group(group_id)
            assert group is not None
            found = {k: wire.decode(score, wire.SampleScore) for k, (_, score) in group.samples.items()}
            assert {k: score.value for k, score in found.items()} == {
                k: float(grade) for k, grade in enumerate(wanted[group_id]) if grade != OUT
            }
        for group_id, group_grades in wanted.items():
            for k, grade in enumerate(group_grades):
                assert ("9 is not within 0 to 8" in letters.get((group_id, k), "")) == (grade == OUT)
        assert not await faults(train)
