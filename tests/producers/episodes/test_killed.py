"""Replicas that are killed or held in the middle of episodes: nothing is lost, and no token is there twice."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial

import msgspec
import numpy as np
import pytest
from transformers import Qwen2ForCausalLM

from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues.keys import GROUP
from streamrl.runtime.audit import audit, structural_faults
from streamrl.weight_sync.publisher import Publisher
from streamrl.wire import PROMPT, Prompt, Sample, decode, encode
from tests.forked import kill
from tests.producers.producer_kit import Hands
from tests.queues.ledger_kit import admit, until, until_async

from .episode_kit import ADD, order_of, save_talker
from .killed_replica import TURNS, serve

GROUPS, SAMPLES, KILLS = 4, 2, 2
WHERE = "tests.producers.episodes.killed_replica"


async def publish(run, ledgers, folder):
    hands = await Hands(ledgers.train).fence()
    publisher = Publisher(run.config.weights, run.config.name, run.run_dir)
    tensors = list(Qwen2ForCausalLM.from_pretrained(folder).named_parameters())
    data = await asyncio.to_thread(publisher.publish, epoch=1, version=1, step=1, tensors=tensors)
    await ledgers.train.finish_step(hands.nonce, 0, 1, data)


def noted(run):
    """What engines sampled: contexts, tokens and log-probabilities. A line that a death cut off was told to nobody."""
    texts = [path.read_text().rpartition("\n")[0] for path in run.run_dir.glob("sampled-*")]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def more_noted(run, replica, count):
    assert replica.exitcode is None, "the replica ended by itself"
    return len(noted(run)) >= count


async def all_emitted(ledger):
    return not any([(await ledger.trace(group_id))["without_payload"] for group_id in range(GROUPS)])


def sampled_turns(prompt, sample):
    """Context, tokens and log-probabilities of each sampled turn, from the record alone."""
    paths, begin = {PROMPT: prompt.token_ids.tolist(), -2: []}, 0
    for number, turn in enumerate(sample.turns):
        before = paths[turn.parent]
        own = turn.observed_ids
        if turn.sampled:
            own = sample.token_ids[begin : begin + turn.sampled]
            logprobs = sample.token_logprobs[begin : begin + turn.sampled]
            begin += turn.sampled
            yield [before, own.tolist(), np.ascontiguousarray(logprobs).tobytes().hex()]
        paths[number] = before + own.tolist()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("episode", ["Honest", "Changing"])
async def test_episodes_survive_the_death_of_their_replicas(run, tmp_path, episode):
    folder = save_talker(tmp_path / "talker", calls=(ADD,))
    run.set("episode", run=f"{WHERE}:{episode}", max_turns=TURNS)
    flat = await samples_of_lives(run, folder)
    replayed, restarts = sum(sample.replayed for sample in flat), sum(sample.restarts for sample in flat)
    assert (replayed > 0, restarts > 0) == ((True, False) if episode == "Honest" else (False, True))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_tools_of_an_environment_with_a_state_do_not_run_again(run, tmp_path):
    """But for those whose turn was not recorded when the process died: they ran at least once."""
    folder, notes = save_talker(tmp_path / "talker", calls=(ADD,), ends=False), tmp_path / "notes"
    run.set("episode", environment=f"{WHERE}:Counter", args={"notes": str(notes)}, max_turns=TURNS)
    flat = await samples_of_lives(run, folder)
    assert sum(sample.replayed for sample in flat) > 0
    assert sum(sample.restarts for sample in flat) == 0
    ran = [line.split() for line in notes.read_text().splitlines()]
    told = {part.split()[1] for sample in flat for part in sample.score.parts}
    lasting = {name for name, _, said in ran if said in told}
    for name in {name for name, _, _ in ran}:
        numbers = [int(number) for each, number, _ in ran if each == name]
        assert numbers == sorted(numbers), "a turn ran again after a later one: it was recorded"
        assert name in lasting or numbers == [1], "recorded turns ran again in a new object"
    tokenizer = Tokenizer.load(run.config.model)
    for sample in flat:
        heard = [tokenizer.decode(turn.observed_ids) for turn in sample.turns if turn.role == "tool"]
        said = [part.split()[1] for part in sample.score.parts]
        assert sample.score.value == TURNS, "its state went through all its lives"
        assert [one in text for one, text in zip(said, heard, strict=False)] == [True] * (TURNS - 1)
        assert {one for _, _, one in ran} >= set(said)


async def samples_of_lives(run, folder):
    """Kill replicas in the middle of episodes, and let a last one finish them; what holds of all samples is checked."""
    run.set("model", path=str(folder), context=1024).set("engine", slots=4, threads=1)
    run.set("sampling", group_size=SAMPLES, max_new_tokens=16)
    run.set("lease", seconds=1.0, max_deliveries=KILLS + 2)
    prompt = order_of(Tokenizer.load(run.config.model)).prompt
    async with run.open() as ledgers:
        train = ledgers.train
        for group_id in range(GROUPS):
            await admit(train, group_id, prompt=encode(prompt), samples=SAMPLES)
        await publish(run, ledgers, folder)
        for life in range(KILLS):
            replica = run.spawn(serve, f"rollout.{life}")
            try:
                await until(partial(more_noted, run, replica, len(noted(run)) + 6), 90)
            finally:
                kill(replica)
        assert not await all_emitted(train), "nobody died in mid-episode"
        replica = run.spawn(serve, "rollout.9")
        try:
            await until_async(lambda: all_emitted(train), 120)
        finally:
            kill(replica)
        samples = [await read(train, group_id) for group_id in range(GROUPS)]
        assert await structural_faults(train) == []
        assert await train.dead_letters() == []
        found = await audit(run.config, run.run_dir, ledgers)
        assert (found.lost, found.twice, found.faults, found.live) == (0, 0, [], GROUPS)
    flat = [sample for group in samples for sample in group]
    assert len(flat) == GROUPS * SAMPLES
    left = noted(run)
    for sample in flat:
        turns = list(sampled_turns(decode(encode(prompt), Prompt), sample))
        assert len(turns) == TURNS
        for turn in turns:
            left.remove(turn)  # each completion of an engine is in one place at most
    return flat


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_tool_that_kills_its_process_is_buried_and_the_others_are_made(run, tmp_path):
    folder = save_talker(tmp_path / "talker", calls=(ADD,))
    run.set("model", path=str(folder), context=1024).set("engine", slots=4, threads=1)
    run.set("sampling", group_size=1, max_new_tokens=16).set("episode", run=f"{WHERE}:Deadly", max_turns=TURNS)
    run.set("lease", seconds=1.0, max_deliveries=3)
    prompt = order_of(Tokenizer.load(run.config.model)).prompt
    lives = 0
    async with run.open() as ledgers:
        train = ledgers.train
        for line in range(GROUPS):
            await admit(train, line, prompt=encode(msgspec.structs.replace(prompt, line=line)), samples=1)
        await publish(run, ledgers, folder)
        while await train.connection.read("XLEN", train.keys.prompts) and lives < 12:
            replica = run.spawn(serve, f"rollout.{lives}")
            lives += 1
            try:
                await until_async(partial(dead_or_done, replica, train), 90)
            finally:
                kill(replica)
        letters = await train.dead_letters()
        made = [group_id for group_id in range(GROUPS) if (await train.trace(group_id)).get("payloads")]
    assert made == [0, 2, 3]
    assert {letter.group_id for letter in letters} == {1}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_tool_that_holds_the_event_loop_is_named_and_costs_no_lease(run, tmp_path):
    folder, gate = save_talker(tmp_path / "talker", calls=(ADD,), ends=False), tmp_path / "gate"
    run.set("model", path=str(folder), context=1024).set("engine", slots=8, threads=1)
    run.set("sampling", group_size=SAMPLES, max_new_tokens=16).set("lease", seconds=1.0)
    run.set("episode", run=f"{WHERE}:Blocking", args={"gate": str(gate)}, max_turns=TURNS)
    prompt = order_of(Tokenizer.load(run.config.model)).prompt
    replicas = []
    async with run.open() as ledgers:
        train = ledgers.train

        async def held_seconds():
            shown = (await ledgers.roles.read()).get("rollout.0", {})
            told = re.search(r"event loop for (\d+) s at .*killed_replica.py:\d+ in add$", shown.get("trouble", ""))
            return int(told[1]) if told and shown["state"] == "blocked" else 0

        async def ready(name):
            return (await ledgers.roles.read()).get(name, {}).get("state") == "ready"

        for group_id in range(GROUPS):
            await admit(train, group_id, prompt=encode(prompt), samples=SAMPLES)
        await publish(run, ledgers, folder)
        try:
            replicas.append(run.spawn(serve, "rollout.0"))
            await until_async(held_seconds, 90)
            replicas.append(run.spawn(serve, "rollout.1"))
            await until_async(lambda: ready("rollout.1"), 90)
            before = await held_seconds()

            async def long_held():
                return await held_seconds() >= before + 4  # four leases, in which rollout.1 takes what has expired

            await until_async(long_held, 90)
            pending = await train.connection.read("XPENDING", train.keys.prompts, GROUP, "-", "+", 10)
            assert {(owner.split(b"-")[0], deliveries) for _, owner, _, deliveries in pending} == {(b"rollout.0", 1)}
            assert len(pending) == GROUPS
            gate.touch()
            await until_async(lambda: all_emitted(train), 120)
            await until_async(lambda: ready("rollout.0"), 30)
            assert [replica.exitcode for replica in replicas] == [None, None]
        finally:
            for replica in replicas:
                kill(replica)
        flat = [sample for group_id in range(GROUPS) for sample in await read(train, group_id)]
    assert {(sample.engine, sample.restarts) for sample in flat} == {("rollout.0", 0)}


async def dead_or_done(replica, ledger):
    return replica.exitcode is not None or not await ledger.connection.read("XLEN", ledger.keys.prompts)


async def read(ledger, group_id):
    known = await ledger.trace(group_id)
    return [decode(payload, Sample) for payload in known["payloads"].values()]
