"""Learners as processes with a critic and a reference: they train, stop, and go on where they were."""

from __future__ import annotations

import asyncio

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from test_reference_servers import Server, fails

from streamrl.config.presets import PRESETS

GAE = {"advantage": {"use": "gae"}, "mini_batches": 2}
FROZEN = {"reference": {"kind": "frozen"}}
RECIPES = {
    # With weight decay an update without a gradient moves the policy too.
    "model": {**GAE, "weight_decay": 0.1, "critic": {"kind": "model", "lr": 1e-3, "warmup_steps": 1}},
    "kl in the reward": {**FROZEN, "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.1}},
    "kl in the loss": {**FROZEN, "kl": {"where": "loss", "coefficient": 0.1, "controller": "adaptive"}},
    "base": {"reference": {"kind": "base"}, "lora": {"rank": 2}, "kl": {"where": "loss"}},
}


def shard(run):
    """What the newest checkpoint of one rank holds."""
    meta = run.newest()
    return load_file(run.run_dir / "checkpoints" / f"ckpt-{meta.epoch}-{meta.step}" / "rank-0-of-1.safetensors")


@pytest.mark.parametrize("recipe", RECIPES)
async def test_a_run_trains_and_goes_on_after_a_stop(run, recipe):
    run.configure(**RECIPES[recipe], steps=2)
    async with run.play():
        assert await run.learn() == 0, run.log()
        run.configure(**RECIPES[recipe], steps=4)
        assert await run.learn() == 0, run.log()
        found = await run.audit()
    lines = run.steps()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert not any(line["skipped"] for line in lines)
    assert found.trained == 16
    if "critic" in RECIPES[recipe]:
        assert [line["updates"] for line in lines] == [0, 2, 2, 2]
        assert all(line["critic_loss"] > 0 for line in lines)
        assert lines[0]["critic_value"] == 0
        assert lines[-1]["critic_value"] != 0
    else:
        assert lines[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
        assert lines[-1]["kl_reference"] != 0


async def test_in_the_warm_up_the_policy_does_not_move_and_the_critic_is_saved(run, model):
    recipe = {**RECIPES["model"], "critic": {**RECIPES["model"]["critic"], "warmup_steps": 2}}
    run.configure(**recipe, steps=2)
    async with run.play():
        assert await run.learn() == 0, run.log()
    held, start = shard(run), load_file(model / "model.safetensors")
    prefix = "actor/weight/"
    policy = {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
    assert policy.keys() == start.keys()
    assert all(torch.equal(policy[name], start[name]) for name in start)
    assert held["critic/weight/value_head.weight"].any()


async def learn_together(run, rendezvous):
    """Two ranks; both have to end well."""
    environ = {"WORLD_SIZE": "2", "STREAMRL_RENDEZVOUS": f"file://{rendezvous}"}
    pids = [run.start(name=f"learner.{rank}", environ={**environ, "RANK": str(rank)}) for rank in range(2)]
    assert [await run.wait(pid) for pid in pids] == [0, 0], run.log() + run.log("learner.1")


async def test_two_ranks_go_on_with_the_critic_of_one_and_one_with_that_of_two(run, tmp_path):
    async with run.play():
        run.configure(**RECIPES["model"], **FROZEN, kl={"where": "reward", "estimator": "k1"}, steps=2)
        recipe = run.config.learner.model_dump(exclude={"ranks", "steps"})
        assert await run.learn() == 0, run.log()
        run.configure(**recipe, ranks=2, steps=4)
        await learn_together(run, tmp_path / "meet")
        run.configure(**recipe, steps=6)
        assert await run.learn() == 0, run.log()
        found = await run.audit()
    assert found.trained == 24
    lines = run.steps()
    assert [line["updates"] for line in lines] == [0, 2, 2, 2, 2, 2]
    assert all(line["critic_value"] != 0 for line in lines[1:])


async def test_two_ranks_wait_together_for_a_reference_server(run, tmp_path):
    server = Server(wrong=fails)
    with server.running() as url:
        reference = {"kind": "remote", "url": [url], "deadline": 0.5}
        run.configure(reference=reference, kl={"where": "loss"}, steps=2, ranks=2)
        async with run.play():
            learning = asyncio.create_task(learn_together(run, tmp_path / "meet"))
            await run.until(lambda: "micro-batch skipped" in run.log())
            server.wrong = None
            await learning
            found = await run.audit()
    assert found.trained == 8
    assert all(line["kl_reference"] > 0 and line["grad_norm"] > 0 for line in run.steps())


async def test_a_teacher_that_dies_is_waited_for_and_taught_by_again(run):
    server = Server()

    async def dies_once_it_has_scored(_):
        return web.Response(status=503) if server.scored > 12 else None

    server.wrong = dies_once_it_has_scored
    with server.running() as url:
        teacher = {"reference": {"kind": "remote", "url": [url], "deadline": 0.5}}
        run.configure(**PRESETS["distill"]["learner"] | teacher, steps=3)
        async with run.play():
            pid = run.start()
            await run.until(lambda: "micro-batch skipped" in run.log())
            server.wrong = None
            assert await run.wait(pid) == 0, run.log()
            found = await run.audit()
    assert found.trained == 12
    assert "reference server failed" in run.log()
    lines = run.steps()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 and line["kl_reference"] != 0 for line in lines)


async def test_without_a_reference_server_the_learner_ends_with_the_reason(run):
    run.configure(reference={"kind": "remote", "url": ["http://127.0.0.1:9"], "deadline": 0.5}, kl={"where": "loss"})
    assert await run.learn() == 69
    assert "learner.reference.url" in run.log()
    assert "Connection refused" in run.log()
