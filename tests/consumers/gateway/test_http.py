"""The gateway over HTTP, without a run: what programs send and get."""

import asyncio
import socket

import aiohttp
import numpy as np
import pytest

from streamrl.config import RunConfig
from streamrl.consumers import RewardContext, Score
from streamrl.consumers.gateway.offers import ProgramFailed, ProgramsLost
from streamrl.consumers.gateway.reward import GatewayReward
from streamrl.errors import CannotCreate, ConfigError, RewardUnavailable
from tests.consumers.gateway.kit import Program, configured, opened, scoring
from tests.queues.ledger_kit import until

NOW = {"wait": 0}


async def test_a_sample_is_fetched_and_its_score_is_the_rewards(tmp_path):
    async with opened(tmp_path) as (reward, program):
        messages = [{"role": "user", "content": "2+2="}]
        prompt = {"prompt": "2+2=", "messages": messages, "answer": "4", "metadata": {"topic": "sums"}}
        async with scoring(reward, "4", tokens=[19, 2], line=17, **prompt) as (task,):
            (given,) = await program.lease(5)
            assert given["sample"] == {
                "group": 7, "index": 0, "evaluation": False, "line": 17, "response": "4", "finish": "stop",
                "tokens": [19, 2], **prompt,
            }  # fmt: skip
            assert 0 < given["expires_in"] <= 60
            answer = await program.post({"lease": given["lease"], "value": 1, "parts": {"exact": 0.5}, "tokens": 12})
            assert (answer["taken"], answer["lost"]) == ([given["lease"]], [])
            assert await task == Score(1.0, {"exact": 0.5}, 12)
        status, about = await program.send("GET", "/v1")
        assert status == 200
        assert {name: about[name] for name in ("waiting", "leased", "taken", "failed", "lost")} == {
            "waiting": 0, "leased": 0, "taken": 1, "failed": 0, "lost": 0,
        }  # fmt: skip


async def test_a_program_that_waits_gets_the_sample_the_moment_it_is_there(tmp_path):
    async with opened(tmp_path) as (reward, program):
        asked = asyncio.create_task(program.lease(2, wait=60))
        other = asyncio.create_task(program.lease(2, wait=60))
        await program.send("GET", "/v1")
        async with scoring(reward, "one"):
            done, pending = await asyncio.wait([asked, other], timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert (len(done), len(pending)) == (1, 1)
            assert len(done.pop().result()) == 1
            async with scoring(reward, "two"):
                assert len(await asyncio.wait_for(pending.pop(), 30)) == 1


async def test_what_a_program_posts_instead_of_a_score_is_a_failure_and_no_number(tmp_path):
    async with opened(tmp_path) as (reward, program), scoring(reward, "a") as (task,):
        (given,) = await program.lease()
        await program.post({"lease": given["lease"], "error": "no answer", "detail": "Trace: line 7"})
        with pytest.raises(ProgramFailed, match="the program says: no answer") as caught:
            await task
        assert caught.value.__notes__ == ["Trace: line 7"]


async def test_a_program_that_goes_away_loses_its_sample_to_the_next(tmp_path):
    async with opened(tmp_path) as (reward, program), scoring(reward, "a") as (task,):
        (lost,) = await program.lease(seconds=1)
        (given,) = await program.lease(wait=30)
        assert given["lease"] != lost["lease"]
        assert given["sample"] == lost["sample"]
        late = await program.post({"lease": lost["lease"], "value": 0})
        assert late["lost"] == [lost["lease"]]
        assert not task.done()
        await program.post({"lease": given["lease"], "value": 1})
        assert (await task).value == 1.0


async def test_a_sample_that_every_program_dies_of_fails_in_the_end(tmp_path):
    async with opened(tmp_path) as (reward, program), scoring(reward, "poison") as (task,):
        for _ in range(3):
            assert len(await program.lease(seconds=1, wait=30)) == 1
        with pytest.raises(ProgramsLost, match="3 programs took this sample"):
            await asyncio.wait_for(task, 30)


async def test_leases_are_renewed_and_given_back(tmp_path):
    async with opened(tmp_path) as (reward, program), scoring(reward, "a", "b") as (task, _):
        (given,) = await program.lease(seconds=600)
        for route, done in (("renew", "renewed"), ("renew", "renewed"), ("release", "released")):
            _, answer = await program.send("POST", f"/v1/{route}", {"leases": [given["lease"], "other"]})
            assert (answer[done], answer["lost"]) == ([given["lease"]], ["other"])
        (again, _) = await program.lease(2)
        assert again["sample"] == given["sample"]
        await program.post({"lease": again["lease"], "value": 1})
        assert (await task).value == 1.0


async def test_a_sample_that_the_worker_gives_up_is_gone(tmp_path):
    async with opened(tmp_path) as (reward, program), scoring(reward, "a", "b") as (task, other):
        (given,) = await program.lease()
        task.cancel()
        await asyncio.wait([task])
        assert (await program.post({"lease": given["lease"], "value": 1}))["lost"] == [given["lease"]]
        other.cancel()
        await asyncio.wait([other])
        assert await program.lease(**NOW) == []


async def test_without_programs_the_reward_is_unavailable_and_with_them_it_waits(tmp_path, monkeypatch):
    def move_the_clock(seconds):
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + seconds)

    async with opened(tmp_path, patience=60) as (reward, program):
        async with scoring(reward, "a") as (task,):
            await until(lambda: reward.counts()["waiting"])
            move_the_clock(61)
            with pytest.raises(RewardUnavailable, match="no program has asked"):
                await asyncio.wait_for(task, 30)
        assert await program.lease(**NOW) == [], "who gives up takes the sample along"
        async with scoring(reward, "b") as (task,):
            (given,) = await program.lease(seconds=600)
            move_the_clock(200)
            await program.send("GET", "/v1")
            assert not task.done(), "a program has it, however long it takes"
            await program.post({"lease": given["lease"], "value": 1})
            assert (await task).value == 1.0


async def test_a_mistake_changes_nothing_and_is_explained(tmp_path):
    async with opened(tmp_path, body_bytes=4096) as (reward, program), scoring(reward, "a", "b") as tasks:
        one, two = await program.lease(2, wait=5)
        good, lease = {"lease": one["lease"], "value": 1}, two["lease"]
        for bad, said in [
            (good, "$.scores[1] has the lease of $.scores[0]"),
            ({"lease": lease}, "either `value` or `error`"),
            ({"lease": lease, "value": 1, "error": "both"}, "either `value` or `error`"),
            ({"lease": lease, "value": "1"}, "$.scores[1].value"),
            ({"lease": lease, "value": True}, "$.scores[1].value"),
            ({"lease": lease, "value": 1, "part": {}}, "unknown field `part`"),
            ({"lease": lease, "value": 1, "parts": {"a": None}}, "$.scores[1].parts"),
            ({"lease": lease, "value": 1, "tokens": -1}, "$.scores[1].tokens"),
            ({"lease": lease, "value": 1, "tokens": 1.5}, "$.scores[1].tokens"),
            ({"lease": lease, "value": 1, "parts": {f"p{n}": 0 for n in range(65)}}, "$.scores[1].parts"),
            ({"lease": lease, "error": ""}, "$.scores[1].error"),
            ({"value": 1}, "missing required field `lease`"),
        ]:
            error = await program.error(422, "POST", "/v1/scores", {"scores": [good, bad]})
            assert error["code"] == "invalid"
            assert said in error["message"]
            assert ("value, parts, tokens" in error["hint"]) == ("either" not in said and bad is not good)
        for raw, status in [
            (b'{"scores": [{"lease": "%s", "value": NaN}]}' % lease.encode(), 400),
            (b'{"scores": [{"lease": "%s", "value": 1e999}]}' % lease.encode(), 422),
            (b'{"scores": [', 400),
            (b"\xff\xfe", 400),
            (b"[" * 2000, 422),
            (b"[]", 422),
            (b"null", 422),
            (b"", 422),
            (b'{"scores": [%s]}' % b",".join([b'{"lease":"a"}'] * 257), 422),
            (b'{"leases": "%s"}' % (b"x" * 5000), 413),
        ]:
            await program.error(status, "POST", "/v1/scores", data=raw)
        assert not any(task.done() for task in tasks)
        answer = await program.post(good, {"lease": lease, "value": 0})
        assert answer["taken"] == [one["lease"], lease]


async def test_a_lease_out_of_range_is_refused(tmp_path):
    async with opened(tmp_path) as (_, program):
        for body, said in [
            ({"count": 0}, "$.count"),
            ({"count": 257}, "$.count"),
            ({"wait": 61}, "$.wait"),
            ({"wait": -1}, "$.wait"),
            ({"seconds": 0.5}, "$.seconds"),
            ({"cuont": 1}, "unknown field `cuont`"),
            ({"version": 2}, "version 2"),
        ]:
            assert said in (await program.error(422, "POST", "/v1/lease", body))["message"]


async def test_other_routes_and_methods_are_errors_in_json_too(tmp_path):
    async with opened(tmp_path) as (_, program):
        assert (await program.error(404, "POST", "/v2/lease", {}))["code"] == "not_found"
        assert (await program.error(405, "GET", "/v1/lease"))["code"] == "method_not_allowed"
        status, _ = await program.send("POST", "/v1/lease", data=b'{"wait": 0}')
        assert status == 200, "an empty content type will do"


async def test_requests_that_find_no_place_to_wait_are_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr("streamrl.consumers.gateway.server.MAX_POLLS", 1)
    async with opened(tmp_path) as (reward, program):
        asked = [asyncio.create_task(program.send("POST", "/v1/lease", {"wait": 60})) for _ in range(2)]
        done, pending = await asyncio.wait(asked, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        status, found = done.pop().result()
        assert (status, found["error"]["code"]) == (503, "busy")
        async with scoring(reward, "one"):
            status, found = await asyncio.wait_for(pending.pop(), 30)
            assert (status, len(found["samples"])) == (200, 1)


async def test_a_body_that_does_not_come_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("streamrl.consumers.gateway.server._READ_SECONDS", 0.05)
    async with opened(tmp_path) as (_, program):
        address = program.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(address[0], int(address[1]))
        writer.write(f"POST /v1/lease HTTP/1.1\r\nHost: {':'.join(address)}\r\nContent-Length: 9\r\n\r\n{{".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b'"slow"' in await asyncio.wait_for(reader.readuntil(b"}"), 30)
        writer.close()


async def test_with_a_token_nobody_gets_anything_without_it(tmp_path):
    token = tmp_path / "gateway.token"
    token.write_text("a-long-random-word\n")
    reward = GatewayReward()
    await reward.open(RewardContext(configured(gateway_token_file=token, gateway_host="0.0.0.0"), tmp_path))
    try:
        async with aiohttp.ClientSession() as session:
            program = Program(reward.url.replace(reward.url.split("//")[1].split(":")[0], "127.0.0.1"), session)
            for header in (None, "Bearer wrong", "Basic a-long-random-word", "Bearer", "Bearer é"):
                program.headers = {} if header is None else {"Authorization": header}
                assert (await program.error(401, "POST", "/v1/lease", NOW))["code"] == "token"
            program.headers = {"Authorization": "Bearer a-long-random-word", "Origin": "http://example.org"}
            assert await program.lease(**NOW) == []
    finally:
        await reward.close()


async def test_without_a_token_no_web_page_can_post(tmp_path):
    async with opened(tmp_path) as (_, program):
        for name, value in [
            ("Origin", "http://evil.example"),
            ("Origin", "null"),
            ("Host", "evil.example"),
            ("Host", "[::"),
        ]:
            program.headers = {name: value}
            assert (await program.error(403, "POST", "/v1/lease", NOW))["code"] == "not_local"
        program.headers = {"Host": "localhost:1234"}
        assert await program.lease(**NOW) == []


async def test_a_prompt_that_json_does_not_know_fails_alone(tmp_path):
    async with opened(tmp_path) as (reward, program):
        async with scoring(reward, "a", metadata={"bytes": np.zeros(1).tobytes()}) as (bad,):
            await asyncio.wait([bad])
            assert isinstance(bad.exception(), TypeError)
        async with scoring(reward, "b"):
            assert len(await program.lease(wait=5)) == 1


async def test_requests_that_wait_go_home_when_the_worker_ends_and_so_does_the_file_with_its_url(tmp_path):
    file = tmp_path / "rewards" / "gateway" / "reward.2.url"
    async with opened(tmp_path, worker="reward.2") as (reward, program):
        assert file.read_text().strip() == reward.url
        waiting = asyncio.create_task(program.lease(wait=60))
        await program.send("GET", "/v1")
        await reward.close()
        assert await asyncio.wait_for(waiting, 30) == []
    assert not file.exists()


async def test_each_worker_has_the_next_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reward = GatewayReward()
        with pytest.raises(CannotCreate, match=f"cannot serve the gateway of rewards on 127.0.0.1 port {port}"):
            await reward.open(RewardContext(configured(gateway_port=port - 3), tmp_path, worker="reward.3"))
        await reward.close()


@pytest.mark.parametrize("text", [None, "short", "é" * 40])
async def test_a_token_that_is_none_is_refused_at_the_start(tmp_path, text):
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
    reward = GatewayReward()
    with pytest.raises(ConfigError, match="token"):
        await reward.open(RewardContext(configured(gateway_token_file=file), tmp_path))
    await reward.close()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rewards": [{"use": "gateway"}]}, "needs reward_worker.gateway_port"),
        ({"reward_worker": {"gateway_port": 0}}, "no reward has `use: gateway`"),
        ({"rewards": [{"use": "gateway"}, {"use": "gateway", "name": "b"}]}, "two rewards use gateway"),
        ({"reward_worker": {"gateway_host": "0.0.0.0"}}, "set gateway_token_file too"),
        ({"reward_worker": {"gateway_host": ""}}, "set gateway_token_file too"),
        ({"reward_worker": {"gateway_port": 70000}}, "65535"),
        ({"reward_worker": {"gateway_port": 65535, "replicas": 2}}, "none above 65535"),
    ],
)
def test_a_gateway_that_cannot_work_is_refused_in_the_run_file(keys, said):
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate(keys)


@pytest.mark.parametrize("args", [{"lease_seconds": 0}, {"lease_seconds": 601}, {"patience": 0}, {"body_bytes": 0}])
def test_args_out_of_range_are_refused(args):
    with pytest.raises(ValueError, match="must be"):
        GatewayReward(**args)
