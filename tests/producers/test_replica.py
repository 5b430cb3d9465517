"""A real tiny model answers prompts through a real Redis, while weights change and replicas die."""

import asyncio
import math
import threading
import time

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from producer_kit import payload, tiny_model, until
from replica_kit import Faulty, Learner, admit, check_sample, emitted, replica_on, samples_of, with_model

from streamrl.config import RunConfig
from streamrl.engine import life_seed
from streamrl.errors import ConfigError, Unreachable
from streamrl.producers import worker
from streamrl.producers.admission import AdmissionTerms, Admitter
from streamrl.producers.sampler import SampleOrder, seed_of
from streamrl.producers.worker import lease_width, run_rollout
from streamrl.queues import Role
from streamrl.wire import Prompt, Sample, decode
from tests.forked import kill

PROMPT = Prompt(tokens=b"")


async def test_the_response_behind_the_group_is_greedy_and_says_so(small):
    small = small.set("sampling", greedy_baseline=True).set("learner", advantage={"use": "remax"})
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers, None)
        await admit(small, ledgers.train, 3, samples=small.config.sampling.responses)
        await admit(small, ledgers.evaluation, 1, samples=6)
        async with small.running(run_rollout, "rollout.0", ledgers):
            await learner.publish(1)
            await until(lambda: emitted(ledgers.train, 15))
            await until(lambda: emitted(ledgers.evaluation, 6))
        model = tiny_model(1).eval()
        for group_id in range(3):
            samples = {at: decode(data, Sample) for at, data in (await samples_of(ledgers.train, group_id)).items()}
            assert [samples[at].greedy for at in range(5)] == [False] * 4 + [True]
            prompt = decode(await ledgers.connection.read("HGET", ledgers.train.keys.group(group_id), "prompt"), Prompt)
            ids = torch.tensor([[*prompt.token_ids.tolist(), *samples[4].token_ids.tolist()]])
            with torch.no_grad():
                best = model(ids).logits[0, len(prompt.token_ids) - 1 : -1].argmax(-1)
            assert samples[4].token_ids.tolist() == best.tolist()
        held_out = await samples_of(ledgers.evaluation, 0)
        assert not any(decode(data, Sample).greedy for data in held_out.values())


async def test_held_out_responses_are_drawn_by_their_own_options(small):
    small = small.set("evaluation", temperature=0, max_new_tokens=5).set("sampling", top_k=3, stop=("never said",))
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers, None)
        await admit(small, ledgers.train, 1, samples=4)
        await admit(small, ledgers.evaluation, 1, samples=3)
        async with small.running(run_rollout, "rollout.0", ledgers):
            await learner.publish(1)
            await until(lambda: emitted(ledgers.train, 4))
            await until(lambda: emitted(ledgers.evaluation, 3))
        held_out = [decode(data, Sample) for data in (await samples_of(ledgers.evaluation, 0)).values()]
        assert len({sample.tokens for sample in held_out}) == 1
        assert not any(sample.greedy for sample in held_out)
        assert {len(sample.token_ids) for sample in held_out} == {5}
        trained = [decode(data, Sample) for data in (await samples_of(ledgers.train, 0)).values()]
        assert {len(sample.token_ids) for sample in trained} == {12}
        prompt = decode(await ledgers.connection.read("HGET", ledgers.train.keys.group(0), "prompt"), Prompt)
        model = tiny_model(1).eval()
        for sample in trained:
            ids = torch.tensor([[*prompt.token_ids.tolist(), *sample.token_ids.tolist()]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1].float()
            kept = logits.topk(3).indices
            assert bool((kept == torch.tensor(sample.token_ids.tolist())[:, None]).any(-1).all())
            whole = torch.log_softmax(logits.gather(1, kept), -1)[kept == ids[0, len(prompt.token_ids) :, None]]
            assert torch.allclose(whole, torch.from_numpy(sample.token_logprobs.copy()), atol=1e-4)


def test_each_sample_and_turn_has_random_numbers_of_its_own():
    config = RunConfig.model_validate({"sampling": {"seed": 3}, "evaluation": {"seed": 4}})
    names = [("g0/0", False), ("g0/1", False), ("g1/0", False), ("e0/0", True)]
    orders = [SampleOrder(PROMPT, "r", seed=seed_of(config, name, evaluation=held_out)) for name, held_out in names]
    seeds = [order.drawn(config, turn)["seed"] for order in orders for turn in (0, 1)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    again = SampleOrder(PROMPT, "other", seed=seed_of(config, "g0/1", evaluation=False))
    assert again.drawn(config, 1)["seed"] == seeds[3]
    plain = RunConfig()
    assert SampleOrder(PROMPT, "r", seed=seed_of(plain, "g0/0", evaluation=False)).drawn(plain)["seed"] is None


async def test_every_sample_of_both_ledgers_is_generated_and_its_figures_are_right(small):
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers, None)
        await admit(small, ledgers.train, 5, samples=4)
        await admit(small, ledgers.evaluation, 3, samples=1)
        async with small.running(run_rollout, "rollout.0", ledgers) as (role, _):
            await asyncio.sleep(0)
            assert not role.is_ready  # nothing is leased before the first version
            await learner.publish(1)
            await until(lambda: emitted(ledgers.train, 20))
            await until(lambda: emitted(ledgers.evaluation, 3))
            assert role.is_ready
        model = tiny_model(1).eval()
        for group_id in range(5):
            found = await samples_of(ledgers.train, group_id)
            assert sorted(found) == [0, 1, 2, 3]
            prompt = decode(await ledgers.connection.read("HGET", ledgers.train.keys.group(group_id), "prompt"), Prompt)
            for data in found.values():
                sample = decode(data, Sample)
                check_sample(model, prompt, sample)
                assert (sample.runs, len(sample.token_ids)) == ([(0, 1)], 12)
        assert (
            len({bytes(data) for group_id in range(5) for data in (await samples_of(ledgers.train, group_id)).values()})
            == 20
        )
        assert role.status["tokens"] == 23 * 12
        assert role.status["version"] == 1
        await until(lambda: "waits" in role.status)
        assert 0 <= role.status["waits"] <= 1
    rows = [orjson.loads(row) for row in (small.run_dir / "metrics" / "rollout.0.jsonl").read_bytes().splitlines()]
    assert sum(delta for row in rows for _, delta in row["timeline"]) == 23 * 12 == rows[-1]["tokens"]
    moments = [moment for row in rows for moment, _ in row["timeline"]]
    assert moments == sorted(moments)
    assert all(row["idle_seconds"] >= 0 for row in rows)


async def test_a_swap_in_flight_gives_spans(small):
    """Each step takes at least 2 ms, so that no response ends before the second version is there."""

    def slow(engine):
        return with_model(engine, lambda model: model.register_forward_pre_hook(lambda *_: time.sleep(0.002)))

    small.set("model", context=1024).set("sampling", max_new_tokens=900)
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        await admit(small, ledgers.train, 1, samples=4)
        async with replica_on(small, ledgers, slow) as (_, role, _):
            await until(lambda: role.status.get("tokens", 0) > 0)
            version = 1
            while not await emitted(ledgers.train, 4):
                version += 1
                await learner.publish(version)
        spans = [decode(data, Sample) for data in (await samples_of(ledgers.train, 0)).values()]
        assert all(len(sample.runs) > 1 for sample in spans)
        for sample in spans:
            versions = [number for _, number in sample.runs]
            assert versions == sorted(set(versions))
            assert versions[0] == 1
            assert versions[-1] <= version


async def test_kill_9_in_mid_group_generates_only_what_is_missing(small):
    small.set("engine", slots=1).set("sampling", group_size=8, max_new_tokens=40)
    async with small.open() as ledgers:
        await Learner.of(small, ledgers)
        await admit(small, ledgers.train, 1, samples=8)
        process = small.spawn(run_rollout, "rollout.0")
        try:
            await until(lambda: emitted(ledgers.train, 1), 60)
        finally:
            kill(process)
        before = await samples_of(ledgers.train, 0)
        assert 1 <= len(before) < 8
        async with small.running(run_rollout, "rollout.0", ledgers) as (role, _):
            await until(lambda: emitted(ledgers.train, 8))
        after = await samples_of(ledgers.train, 0)
        assert {sample: after[sample] for sample in before} == before
        assert role.status["tokens"] == (8 - len(before)) * 40
        assert len({bytes(data) for data in after.values()}) == 8  # two lives, no response twice
        assert await ledgers.connection.read("XLEN", ledgers.train.keys.prompts) == 0


async def test_drain_hands_back_without_counting_a_delivery(small, monkeypatch):
    monkeypatch.setattr(worker, "DRAIN_SHARE", 0.0)
    small.set("model", context=1024).set("engine", slots=1).set("sampling", max_new_tokens=900)
    async with small.open() as ledgers:
        await Learner.of(small, ledgers)
        await admit(small, ledgers.train, 1, samples=4)
        async with small.running(run_rollout, "rollout.0", ledgers) as (role, _):
            await until(lambda: role.status.get("tokens", 0) > 0)
        assert not await emitted(ledgers.train, 4)
        [row] = await ledgers.connection.read("XPENDING", ledgers.train.keys.prompts, "g", "-", "+", 10)
        assert row[1] == b"handed-back"
        assert row[3] == 0


async def test_drain_finishes_what_is_in_flight(small):
    async with small.open() as ledgers:
        await Learner.of(small, ledgers)
        await admit(small, ledgers.train, 1, samples=4)
        async with small.running(run_rollout, "rollout.0", ledgers) as (role, task):
            await until(lambda: role.status.get("running", 0) > 0 or role.status.get("tokens", 0) > 0)
            role.stop.set()
            await asyncio.wait_for(task, 30)
        assert await emitted(ledgers.train, 4)


async def test_a_stop_before_the_first_version_ends_at_once(small):
    async with small.open() as ledgers, small.running(run_rollout, "rollout.0", ledgers) as (role, task):
        await asyncio.sleep(0)
        role.stop.set()
        await asyncio.wait_for(task, 30)
        assert not role.is_ready


class Endless(Faulty):
    """Never answers; `well` is what its health says."""

    well = True

    async def generate(self, request):
        await asyncio.Event().wait()

    async def health(self):
        if not self.well:
            raise Unreachable("it hangs")


async def with_faults(small, ledgers, faults, check, kind=Faulty):
    await Learner.of(small, ledgers)
    await admit(small, ledgers.train, 1, samples=2)
    async with replica_on(small, ledgers, lambda engine: kind(engine, faults)) as (faulty, _, task):
        return await check(faulty, task)


async def test_a_failing_request_is_tried_again(small):
    small.set("sampling", group_size=2)
    async with small.open() as ledgers:

        async def check(engine, task):
            await until(lambda: settled(ledgers.train))
            assert not task.done()

        await with_faults(small, ledgers, [RuntimeError("broken"), RuntimeError("broken")], check)
        assert len(await samples_of(ledgers.train, 0)) == 2
        assert not await ledgers.train.dead_letters()


async def settled(ledger):
    return await ledger.connection.read("XLEN", ledger.keys.prompts) == 0


async def test_a_request_that_always_fails_is_a_dead_letter_with_its_traceback(small):
    small.set("sampling", group_size=2, min_group=1)
    async with small.open() as ledgers:

        async def check(engine, task):
            await until(lambda: settled(ledgers.train))
            assert engine.calls == 6
            assert not task.done()
            return await ledgers.train.dead_letters()

        letters = await with_faults(small, ledgers, [RuntimeError("the cause")] * 6, check)
    own = [letter for letter in letters if letter.sample is not None]
    assert {letter.sample for letter in own} == {0, 1}
    assert all("the cause" in letter.why and "in generate" in letter.detail for letter in own)


async def test_the_death_of_the_engine_is_the_death_of_the_replica(small):
    async with small.open() as ledgers:

        async def check(engine, task):
            with pytest.raises(Unreachable, match="the engine died"):
                await asyncio.wait_for(asyncio.shield(task), 30)

        await with_faults(small, ledgers, [Unreachable("the engine died")], check)
        [row] = await ledgers.connection.read("XPENDING", ledgers.train.keys.prompts, "g", "-", "+", 10)
        assert row[3] == 1  # it died holding this: that counts


@pytest.mark.parametrize("patience", ["of the update", "of the step", "of the request"])
async def test_an_engine_that_hangs_ends_the_replica_and_kills_no_prompt(small, patience):
    """The real engine, whose forward pass never returns: nothing that it was given may become a dead letter."""
    if patience != "of the request":
        small.set("weights", deadline=1.0)
    else:
        small.set("lease", max_hold=2.0)
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        await admit(small, ledgers.train, 3, samples=4)
        entered, free = threading.Event(), threading.Event()

        def hang(*_):
            entered.set()
            free.wait(60)

        def hanging(engine):
            return with_model(engine, lambda model: model.register_forward_pre_hook(hang))

        async with replica_on(small, ledgers, hanging) as (engine, _, task):
            try:
                await until(entered.is_set)
                if patience == "of the update":
                    engine._longest_step = math.inf  # only the update's own deadline is left
                    await learner.publish(2)
                with pytest.raises(Unreachable):
                    await asyncio.wait_for(task, 30)
                assert not await ledgers.train.dead_letters()
                assert (await ledgers.train.state()).live == 3
            finally:
                free.set()


async def test_a_response_that_takes_too_long_asks_first_whether_the_engine_is_well(small):
    """Within the longest hold a well engine is too slow for this prompt; another engine would be to blame itself."""
    small.set("lease", seconds=30, max_hold=0.5).set("sampling", group_size=2)
    async with small.open() as ledgers:

        async def check(engine, task):
            engine.well = False
            with pytest.raises(Unreachable):
                await asyncio.wait_for(asyncio.shield(task), 30)
            return await ledgers.train.dead_letters()

        assert not await with_faults(small, ledgers, [], check, kind=Endless)


async def test_a_prompt_that_is_no_message_is_a_dead_letter(small):
    async with small.open() as ledgers:
        await Learner.of(small, ledgers)
        terms = AdmissionTerms("f", 2, 1, 100, 100, 100)
        await Admitter(ledgers.train, terms, lambda group_id: payload(1) if group_id else b"\x00garbage").admit(
            1, limit=2
        )
        async with small.running(run_rollout, "rollout.0", ledgers):
            await until(lambda: settled(ledgers.train))
        letters = await ledgers.train.dead_letters()
        assert {letter.group_id for letter in letters} == {0, 1}
        assert any(letter.why == "not a prompt" for letter in letters)


async def test_no_model_is_a_configuration_error(small, tmp_path):
    small.set("model", path=str(tmp_path / "none"))
    async with small.open() as ledgers:
        with pytest.raises(ConfigError) as caught:
            await run_rollout(small.role("rollout.0", ledgers))
    assert caught.value.exit_code == 78


async def test_a_bad_version_is_shown_and_the_old_one_goes_on(small):
    async with small.open() as ledgers:
        learner = await Learner.of(small, ledgers)
        async with small.running(run_rollout, "rollout.0", ledgers) as (role, _):
            await until(lambda: role.is_ready)
            await ledgers.train.finish_step(learner.hands.nonce, 0, 2, b"not a manifest")
            await until(lambda: role.status.get("weights_refused") == 1)
            assert role.status["version"] == 1
            await learner.publish(3)
            await until(lambda: role.status["version"] == 3)


@given(
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(0, 50),
    st.integers(0, 1000),
    st.integers(0, 50),
)
def test_the_width_fills_the_slots_and_not_much_more(slots, group, unopened, missing, opened):
    held = unopened + opened
    width = lease_width(held, unopened, missing, slots, group)
    work = missing + (unopened + width - held) * group
    assert width >= held
    assert work >= slots  # every slot has work
    assert width == held or work < slots + math.ceil(slots / 4) + group


async def test_no_two_lives_draw_one_seed_and_the_first_can_be_repeated(small, tmp_path):
    async def seeds(ledgers, run_dir=None):
        names = ("rollout.0", "rollout.1", "engine.0")
        return [await life_seed(Role(name, small.config, run_dir or small.run_dir, ledgers)) for name in names]

    async with small.open() as ledgers:
        first = await seeds(ledgers)
        later = [*await seeds(ledgers), *await seeds(ledgers, tmp_path / "a directory without its metrics")]
    assert len({*first, *later}) == 9
    assert all(0 <= seed < 2**63 for seed in (*first, *later))
    small.set(None, name="again")
    async with small.open() as ledgers:
        assert await seeds(ledgers) == first
    small.set(None, name="another", seed=1)
    async with small.open() as ledgers:
        assert not {*await seeds(ledgers)} & {*first}
