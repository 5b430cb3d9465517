"""Role `agent`: episodes in processes of their own, which call the replicas over HTTP."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

from streamrl.producers.tokenizer import Tokenizer
from streamrl.runtime.audit import audit
from streamrl.weight_sync.files import make_token
from streamrl.wire import encode
from tests.producers.producer_kit import kill
from tests.queues.ledger_kit import admit, until, until_async

from .episode_kit import ADD, order_of, save_talker
from .killed_replica import TURNS
from .test_killed import all_emitted, more_noted, noted, publish, read, sampled_turns

SAMPLES, GROUPS = 2, 4
WHERE = "tests.producers.episodes.killed_replica"
AGENT = "streamrl.producers.agents:run_agent"


@contextlib.contextmanager
def spawned(run, coroutine, *names):
    """Processes by name; killed at the end."""
    living = {name: run.spawn(coroutine, name) for name in names}
    try:
        yield living
    finally:
        for process in living.values():
            kill(process)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_episodes_survive_the_death_of_an_agent_and_of_the_replica(run, tmp_path):
    folder = save_talker(tmp_path / "talker", calls=(ADD,))
    run.set("model", path=str(folder), context=1024).set("engine", decode="slots", slots=4, threads=1)
    run.set("sampling", group_size=SAMPLES, max_new_tokens=16)
    run.set("episode", run=f"{WHERE}:Honest", max_turns=TURNS, processes=2)
    run.set("lease", seconds=1.0, max_deliveries=5)
    make_token(run.run_dir)
    prompt = order_of(Tokenizer.load(run.config.model)).prompt
    async with run.open() as ledgers:
        for group_id in range(GROUPS):
            await admit(ledgers.train, group_id, prompt=encode(prompt), samples=SAMPLES)
        await publish(run, ledgers, folder)
        with (
            spawned(run, f"{WHERE}:serve", "rollout.0") as replicas,
            spawned(run, AGENT, "agent.0", "agent.1") as agents,
        ):
            await until(partial(more_noted, run, replicas["rollout.0"], 6), 90)
            kill(agents["agent.0"])
            before = len(noted(run))
            await until(partial(more_noted, run, agents["agent.1"], before + 4), 90)
            assert not await all_emitted(ledgers.train), "nobody died in mid-episode"
            kill(replicas["rollout.0"])
            replicas["rollout.0"] = run.spawn(f"{WHERE}:serve", "rollout.0")
            await until_async(lambda: all_emitted(ledgers.train), 120)
            assert agents["agent.1"].poll() is None, "the agent died with its replica"
        assert await ledgers.train.dead_letters() == []
        found = await audit(run.config, run.run_dir, ledgers)
        assert (found.lost, found.twice, found.faults, found.live) == (0, 0, [], GROUPS)
        flat = [sample for group_id in range(GROUPS) for sample in await read(ledgers.train, group_id)]
    left = noted(run)
    assert len(flat) == GROUPS * SAMPLES
    for sample in flat:
        for turn in sampled_turns(prompt, sample):
            left.remove(turn)  # each completion of an engine is in one place at most
    assert sum(sample.replayed for sample in flat) > 0
    assert sum(sample.restarts for sample in flat) == 0
    assert {sample.engine for sample in flat} <= {"agent.0", "agent.1"}
