"""Our own server, as a real process, over the network: it keeps the engine contract."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress

import aiohttp
import pytest
import torch
from serve_kit import KEY, TOKEN, Served, caught, client_of, completion_of, request

from streamrl.errors import ConfigError, DataError, StreamrlError
from streamrl.producers.serve.app import MAX_BODY
from tests.engines import tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_log_probabilities_and_listeners(served, version):
    new, judge = version(3)
    async with served.engine() as engine:
        await engine.apply(new)
        heard: dict[int, list[int]] = {k: [] for k in range(12)}
        asked = [request(str(k), 1 + 5 * k, 10 + 7 * k, seed=k) for k in heard]
        done = await asyncio.gather(
            *(engine.generate(one, lambda tokens, _, k=k: heard[k].extend(tokens)) for k, one in enumerate(asked))
        )
        for k, (one, completion) in enumerate(zip(asked, done, strict=True)):
            assert completion.runs == [(0, new.number)]
            assert completion.finish == "length"
            assert heard[k] == completion.tokens.tolist()
            assert completion.prompt_tokens == len(one.tokens)
            assert tiny.worst_error({new.number: judge}, one.tokens.tolist(), completion) < 1e-4
        assert engine.load().running == 0


async def test_one_response_shows_two_versions(served, version):
    """Paused in mid-flight, updated, resumed: the last event has the spans, and the old keys and values count."""
    (old, old_judge), (new, judge) = version(4), version(5)
    async with served.engine() as engine, client_of(served) as client:
        await engine.apply(old)
        _, (stream, events), got = await caught(client)
        await engine.apply(new)
        await client.post("/resume", {"owner": "catcher"})
        got += [event async for event in events]
        await stream.__aexit__(None, None, None)
    last = got[-1]
    tokens = [token for event in got for token in event["tokens"]]
    assert last["finish"] == "length"
    assert len(tokens) == 450
    (first, before), (boundary, after) = last["runs"]
    assert (first, before, after) == (0, old.number, new.number)
    assert 0 < boundary < 450
    assert tiny.worst_error({old.number: old_judge, new.number: judge}, [9, 10, 11], completion_of(got)) < 1e-4


async def test_abort_returns_what_there_is(served):
    async with client_of(served) as client:
        name, (stream, events), got = await caught(client)
        assert await client.post("/abort", {"id": "nobody"}) == (200, {"ended": 0})
        assert await client.post("/abort", {"id": name}) == (200, {"ended": 1})
        got += [event async for event in events]
        await stream.__aexit__(None, None, None)
        assert got[-1]["finish"] == "abort"
        count = sum(len(event["tokens"]) for event in got)
        assert 1 <= count < 450
        assert (await client.post("/resume", {"owner": "catcher"}))[1] == {"paused": False}
    async with served.engine() as engine:
        task = asyncio.create_task(engine.generate(request("a", limit=500)))
        while not task.done():
            await asyncio.sleep(0)
            await engine.abort()
        assert (await task).finish in {"abort", "length"}


async def test_who_hangs_up_aborts(served):
    async with client_of(served) as client:
        _, (stream, _), _ = await caught(client)
        assert (await client.figures())["running"] == 1
        await stream.__aexit__(None, None, None)
        await client.session.close()
    async with client_of(served) as client:
        # a decoder drops a request at its next step, so it must take one
        await client.post("/resume", {"owner": "catcher"})
        await client.until(lambda figures: figures["running"] + figures["waiting"] == 0)


async def test_a_pause_ends_with_the_silence_of_its_owner(served):
    """A client that pauses and is killed: nobody resumes, and the server goes on by itself."""
    code = (
        "import json, sys, time, urllib.request as u\n"
        "def post(path, body):\n"
        "    head = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + sys.argv[2]}\n"
        "    u.urlopen(u.Request(sys.argv[1] + path, json.dumps(body).encode(), head)).read()\n"
        "post('/pause', {'owner': 'doomed', 'seconds': 1})\n"
        "print('paused', flush=True)\n"
        "while True:\n"
        "    time.sleep(0.1)\n"
        "    post('/pause', {'owner': 'doomed', 'seconds': 1})\n"
    )
    client_process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, served.url, KEY, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert client_process.stdout is not None
        assert await client_process.stdout.readline() == b"paused\n"
        async with client_of(served) as client, client.stream("waits", 3) as events:
            assert (await client.figures())["paused"]
            client_process.kill()
            await client_process.wait()
            assert [event["finish"] async for event in events if "finish" in event] == ["length"]
            assert not (await client.figures())["paused"]
    finally:
        with suppress(ProcessLookupError):
            client_process.kill()
        await client_process.wait()


async def test_a_pause_belongs_to_its_owner(served):
    async with client_of(served) as client:
        for owner in ("a", "b"):
            await client.post("/pause", {"owner": owner, "seconds": 600})
        assert (await client.post("/resume", {"owner": "stranger"}))[1] == {"paused": True}
        assert (await client.post("/resume", {"owner": "a"}))[1] == {"paused": True}
        assert (await client.post("/resume", {"owner": "a"}))[1] == {"paused": True}
        # a new replica comes, pauses for its update and resumes: the other's pause stays
        assert (await client.post("/resume", {"owner": "b"}))[1] == {"paused": False}


async def test_sleep_and_wake(served):
    async with served.engine() as engine:
        await engine.sleep(1)
        task = asyncio.create_task(engine.generate(request("a", limit=5)))
        await engine.wake(["kv_cache"])
        assert not task.done()
        await engine.wake()
        assert len((await task).tokens) == 5
    async with client_of(served) as client:
        status, said = await client.post("/sleep", {"level": 7})
        assert (status, said["error"]["kind"]) == (400, "request")


# --- who may come in, and with what ---


async def test_without_the_key_nobody_gets_in(served, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("another key")
    with pytest.raises(ConfigError, match="key"):
        async with served.engine(engine={"api_key_file": wrong}):
            pass
    async with aiohttp.ClientSession() as session:
        for method, path in (("GET", "/ready"), ("GET", "/nothing"), ("POST", "/pause"), ("POST", "/weights/update")):
            async with session.request(method, served.url + path, json={}) as response:
                assert response.status == 401
                assert (await response.json())["error"]["kind"] == "forbidden"
                assert KEY not in await response.text()
        for header in ("Bearer ", "Basic " + KEY, "Bearer " + KEY + "x", "bearer", "Bearer \u00e9"):
            async with session.get(served.url + "/about", headers={"Authorization": header}) as response:
                assert response.status == 401


async def test_bodies_that_are_too_large_or_no_messages(served):
    async with client_of(served) as client:
        body = b'{"id": "' + b"x" * MAX_BODY + b'"}'

        async def pieces():
            for start in range(0, len(body), 1 << 16):
                yield body[start : start + (1 << 16)]

        head = {"Content-Type": "application/json"}
        for make in (lambda: body, pieces):
            for path in ("/abort", "/generate"):
                try:
                    async with client.session.post(served.url + path, data=make(), headers=head) as response:
                        assert response.status == 413
                except (aiohttp.ClientConnectionError, OSError):
                    continue  # it hung up on the rest of the body
        good = {"id": "x", "tokens": [9], "max_new_tokens": 2}
        for bad in (
            good | {"tokens": "text"},
            good | {"tokens": [1 << 40]},
            good | {"interval": 0},
            good | {"id": ""},
            good | {"nonsense": 1},
            [good],
        ):
            status, said = await client.post("/generate", bad)
            assert (status, said["error"]["kind"]) == (400, "request")
        for refused in (good | {"tokens": []}, good | {"tokens": [320]}, good | {"tokens": [9] * 512}):
            status, said = await client.post("/generate", refused)
            assert (status, said["error"]["kind"]) == (400, "data")
        async with client.session.post(served.url + "/abort", data=b"{}", headers={"Content-Type": "text/plain"}) as r:
            assert r.status == 415
        async with client.session.post(served.url + "/abort", data=b"[" * 100_000, headers=head) as r:
            assert r.status == 400
        assert (await client.get("/nothing"))[0] == 404
        assert (await client.post("/about", {}))[0] == 405
        async with client.session.get(served.url + "/generate") as r:
            assert r.status == 405
    async with served.engine() as engine:
        with pytest.raises(DataError):
            await engine.generate(request("a", 0))
        assert len((await engine.generate(request("a", limit=3))).tokens) == 3


async def test_an_id_belongs_to_one_request_at_a_time(served):
    async with client_of(served) as client:
        await client.post("/pause", {"owner": "test", "seconds": 600})
        async with client.stream("same", 3) as events:
            status, said = await client.post("/generate", {"id": "same", "tokens": [9], "max_new_tokens": 3})
            assert (status, said["error"]["kind"]) == (409, "request")
            await client.post("/resume", {"owner": "test"})
            assert [event["finish"] async for event in events if "finish" in event] == ["length"]


# --- its own end ---


async def test_an_orderly_end(served):
    """The last test with the shared server: what is in flight ends with what it has, and the exit code is 0."""
    async with client_of(served) as client:
        _, (stream, events), got = await caught(client)
        os.kill(served.process.pid, signal.SIGTERM)
        got += [event async for event in events]
        await stream.__aexit__(None, None, None)
        assert got[-1]["finish"] == "abort"
        assert sum(len(event["tokens"]) for event in got) < 450
    assert await served.wait_end() == 0
    log = served.log.read_text()
    assert KEY not in log
    assert TOKEN not in log
    assert "Traceback" not in log


async def test_an_engine_that_dies_takes_the_server_with_it(tmp_path):
    """Finite weights whose logits are not: the decode loop dies; on loopback, without a key."""
    tiny.make_model(tmp_path / "model")
    server = Served(tmp_path / "model", tmp_path / "log")
    try:
        await server.ready()
        async with aiohttp.ClientSession() as session:
            page = {"Origin": "http://evil.example"}
            async with session.post(server.url + "/abort", json={"id": None}, headers=page) as response:
                assert response.status == 403
        weights = tiny.random_weights(1)
        huge = {name: torch.full_like(value, 3e38) for name, value in weights.items()}
        async with server.engine() as engine:
            await engine.apply(tiny.make_version(tmp_path, 1, huge))
            with pytest.raises(StreamrlError):
                await engine.generate(request("a", limit=10))
        assert await server.wait_end() == 69
        assert "not finite" in server.log.read_text()
    finally:
        server.kill()


async def test_a_server_makes_a_key_for_its_owner_alone_unless_it_is_given_one(tmp_path, monkeypatch):
    tiny.make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    argv = [sys.executable, "-m", "streamrl", "engines", "serve", "model", "--port", "0", "--set", "engine.threads=1"]
    server = await asyncio.create_subprocess_exec(*argv, "--set", "model.context=512", stderr=subprocess.PIPE)
    try:
        assert server.stderr is not None
        async with asyncio.timeout(100):
            while not (line := (await server.stderr.readline()).decode()).startswith("serving"):
                pass
        assert line.endswith("; its key is in engine.key\n")
        assert (tmp_path / "engine.key").stat().st_mode & 0o777 == 0o600
        url = line.split()[3].rstrip(";")
        statuses = []
        async with aiohttp.ClientSession() as session:
            for key in ("wrong", (tmp_path / "engine.key").read_text().strip()):
                async with session.get(url + "/about", headers={"Authorization": f"Bearer {key}"}) as answer:
                    statuses.append(answer.status)
        assert statuses == [401, 200]
    finally:
        server.kill()
        await server.wait()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--no-api-key", "--host", "0.0.0.0", "--port", "0"], "--api-key-file"),
        (["--host", "no.such.host.invalid"], "not an address"),
        (["--port", "TAKEN"], "already in use"),
        (["--api-key-file", "/nowhere/key"], "cannot be read"),
        (["--set", "engine.slotz=3"], "slots"),
    ],
)
async def test_a_start_that_cannot_be(tmp_path, arguments, says):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [str(taken.getsockname()[1]) if word == "TAKEN" else word for word in arguments]
        argv = [sys.executable, "-m", "streamrl", "engines", "serve", str(tmp_path), *words]
        ended = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 78
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
