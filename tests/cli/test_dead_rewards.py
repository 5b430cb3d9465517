"""Dead letters of rewards: what a reward could not score is listed with its traceback, seen, and replayed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl import wire
from streamrl.queues import embedded, open_ledgers
from tests.consumers.samples import response
from tests.consumers.worker_kit import worker
from tests.queues.ledger_kit import lease, until, until_async

from .run_kit import admit, cli, data_of, make_run

HERE = Path(__file__).parent


async def answer(ledger, group_id: int, *texts: str) -> None:
    """Emit these responses to the group, which waits for them."""
    (held,) = await lease(ledger, "prompts")
    assert held.group_id == group_id
    for number, text in enumerate(texts):
        await ledger.emit(held, number, wire.encode(response(text)))


@pytest.mark.parametrize("whole", [False, True])
async def test_a_group_that_a_reward_doomed_is_replayed_and_scored_anew(tmp_path, whole):
    config = make_run(
        tmp_path,
        f"rewards=[{{use: 'rescore_rewards:{'Refusing' if whole else 'refuses'}', attempts: 1, on_failure: dead}}]",
        f"plugin_paths=[{HERE}]",
    )
    async with embedded.running(config.redis, tmp_path), open_ledgers(config, tmp_path) as ledgers:
        train = ledgers.train

        async def is_dead():
            return any(letter.sample is None for letter in await train.dead_letters())

        async def is_closed():
            return await train.closed() == [0]

        async def command(*arguments):
            done = await asyncio.to_thread(cli, *arguments, "--run", str(tmp_path), "--json")
            assert done.returncode == 0, done.stderr
            return done.stdout

        async with worker(config, tmp_path, ledgers) as role:
            await until(lambda: role.is_ready)
            await admit(train, 0)
            await answer(train, 0, "42", "bad")
            await until_async(is_dead)
            letters = data_of(await command("dead", "ls"), "streamrl.dead/1")["letters"]
            group = next(letter for letter in letters if letter["sample"] is None)
            assert (group["stage"], group["prompt"]["text"]) == ("reward", "prompt 0")
            assert "ValueError: I do not like this" in group["why"]
            detailed = next(letter["id"] for letter in letters if letter["detail"])
            shown = data_of(await command("dead", "show", detailed), "streamrl.dead.show/1")
            assert "rescore_rewards.py" in shown["detail"]
            scores = await asyncio.to_thread(cli, "trace", "0", "--run", str(tmp_path))
            assert "I do not like this" in scores.stdout
            answered = data_of(await command("dead", "replay", group["id"]), "streamrl.dead.replay/1")
            assert answered == [{"group": 0, "outcome": "replayed"}]
            await answer(train, 0, "42", "good")
            await until_async(is_closed)
        data = data_of(await command("trace", "0"), "streamrl.trace/1")
        assert (data["attempt"], data["state"], data["letters"]) == (2, "closed", [])
        assert [response["score"] for response in data["responses"]] == [1.0, 1.0]
        audit = data_of(await command("audit"), "streamrl.audit/2")
        assert (audit["dead"], audit["live"], audit["lost"]) == (0, 1, 0)
