"""What is proved before a server gets its first request."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest
from toy import Toy, make_dialect, serving
from toy_kit import config

from streamrl.errors import ConfigError, Unreachable
from streamrl.http import HttpClient
from streamrl.producers.tokenizer import Tokenizer
from streamrl.servers import check
from streamrl.servers.dialect import PROBE
from tests.redis_kit import free_port
from tests.vision_kit import make_vision_model

pytestmark = pytest.mark.usefixtures("short_pauses")


def run_of(tiny_dir, context=32):
    return config(model={"path": str(tiny_dir), "context": context}, sampling={"max_new_tokens": 4})


async def connect(url, run, dialect=None, key=None):
    client = HttpClient(url, key)
    try:
        return await check.connect(client, dialect or make_dialect(), run, external=True)
    finally:
        await client.close()


async def checked(toy, run, **more):
    async with serving(toy) as url:
        return await connect(url, run, **more)


@pytest.fixture
def toy(tiny_dir):
    """One that has the model and the tokenizer of the run."""
    toy = Toy()
    toy.about["probe"] = Tokenizer.load(config(model={"path": str(tiny_dir)}).model).plain_ids(PROBE)
    return toy


async def refused(toy, run, **more):
    with pytest.raises(ConfigError) as caught:
        await checked(toy, run, **more)
    assert caught.value.hint
    return caught.value


async def test_the_right_server(toy, tiny_dir):
    facts = await checked(toy, run_of(tiny_dir))
    assert (facts.context, facts.vocabulary) == (32, 128)
    tried = [body for path, body in toy.bodies if path == "/generate"]
    assert [(body["tokens"], body["max"]) for body in tried] == [(toy.about["probe"][:4], 1)]


@pytest.mark.parametrize(
    ("change", "says", "hint"),
    [
        (lambda about: {"probe": about["probe"][::-1]}, "has another tokenizer", "model.path"),
        (lambda _: {"context": 31}, "context of 31 tokens, the run needs 32", "model.context to 31"),
    ],
)
async def test_a_server_that_does_not_fit_the_run(toy, tiny_dir, change, says, hint):
    toy.about |= change(toy.about)
    error = await refused(toy, run_of(tiny_dir))
    assert says in error.message
    assert hint in error.hint


ABOUT = ["/about 404", "/about junk", "/about html", "/about 500", "/ready 404", "/ready 500"]
GENERATE = ["/generate 404", "/generate 403", "/generate html", "/generate 400"]


@pytest.mark.parametrize("fault", [*ABOUT, *GENERATE])
async def test_no_such_server(toy, tiny_dir, fault):
    path, _, what = fault.partition(" ")
    toy.faults[path] = [int(what) if what.isdecimal() else what] * 9
    error = await refused(toy, run_of(tiny_dir))
    assert "does not answer as engine.kind toy does" in error.message
    assert "engine.kind" in error.hint


async def test_log_probabilities_that_are_missing(toy, tiny_dir, monkeypatch):
    dialect = make_dialect()
    whole = dialect.chunk
    monkeypatch.setattr(dialect, "chunk", lambda message, received: whole({}, received=received))
    assert "no chunk of a toy" in (await refused(toy, run_of(tiny_dir), dialect=dialect)).message


async def test_a_tokenizer_of_another_model(toy, tiny_dir, monkeypatch):
    monkeypatch.setattr(check, "_sizes", lambda _: (max(toy.about["probe"]), 64))
    error = await refused(toy, run_of(tiny_dir))
    assert "ids above the vocabulary" in error.message
    assert "model.tokenizer" in error.hint


async def test_a_server_that_wants_a_key(toy, tiny_dir):
    toy.key = "s3cret"
    error = await refused(toy, run_of(tiny_dir))
    assert "wants a key" in error.message
    assert "engine.api_key_file" in error.hint
    assert await checked(toy, run_of(tiny_dir), key="s3cret")


@pytest.fixture(scope="module")
def seeing_dir(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("seeing"), "qwen2_vl")


def counting(off):
    """A dialect of a server that counts so many more tokens in each prompt."""
    dialect = make_dialect()
    whole, asked = dialect.chunk, []

    def generation(request, **more):
        asked.append(request)
        return type(dialect).generation(dialect, request, **more)

    def chunk(message, received):
        return replace(whole(message, received=received), prompt_tokens=len(asked[-1].tokens) + off)

    dialect.generation, dialect.chunk, dialect.asked = generation, chunk, asked
    return dialect


async def test_a_model_that_sees_is_tried_with_images(seeing_dir):
    dialect = counting(0)
    await checked(Toy(), run_of(seeing_dir, context=64), dialect=dialect)
    text, small, large = dialect.asked
    assert (len(text.images), len(small.images), len(large.images)) == (0, 1, 1)
    assert text.forbidden
    assert small.images[0].count < large.images[0].count < 64


async def test_a_server_with_another_image_processor(seeing_dir):
    error = await refused(Toy(), run_of(seeing_dir, context=64), dialect=counting(4))
    assert "does not take images: the server counts 14 tokens in a prompt with images, streamrl 10" in error.message
    assert "model.image_processor" in error.hint


async def test_a_server_for_text_that_is_shown_an_image(seeing_dir):
    toy = Toy()
    toy.faults["/generate"] = [None, 400]
    error = await refused(toy, run_of(seeing_dir, context=64))
    assert "does not take images: " in error.message
    assert "with images allowed" in error.hint


async def test_a_server_that_samples_nothing(toy, tiny_dir):
    toy.faults["/generate"] = ["hang"]
    run = run_of(tiny_dir).model_copy(update={"weights": config(weights={"deadline": 0.3}).weights})
    with pytest.raises(Unreachable, match="sampled no token within"):
        await checked(toy, run)


async def test_one_that_runs_already_may_be_starting(toy, tiny_dir):
    port = free_port()
    connecting = asyncio.create_task(connect(f"http://127.0.0.1:{port}", run_of(tiny_dir)))
    await asyncio.sleep(0.1)
    async with serving(toy, port):
        assert (await connecting).context == 32


async def test_nobody_is_there(tiny_dir, monkeypatch):
    monkeypatch.setattr(check, "_PATIENCE", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable, match="/about"):
            await connect(f"http://127.0.0.1:{taken.getsockname()[1]}", run_of(tiny_dir))


async def test_a_model_that_is_not_here_is_compared_with_nothing(caplog):
    await checked(Toy(), config())
    assert any("no configuration of the model" in record.message for record in caplog.records)


@pytest.mark.parametrize("fault", [[], [404], [500]])
async def test_a_server_that_was_left_asleep_is_woken_and_resumed(toy, tiny_dir, fault):
    toy.faults["/wake"] = fault
    toy.paused = True
    await checked(toy, run_of(tiny_dir))
    said = [(path, body) for path, body in toy.bodies if path in {"/wake", "/resume", "/generate"}]
    assert [path for path, _ in said] == ["/wake", "/resume", "/generate"]
    assert said[0][1] == {"tags": ["weights", "kv_cache"]}
    assert not toy.paused
