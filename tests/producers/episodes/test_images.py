"""Episodes with images: turns add what a whole chat has, each image is processed once, and who has its bytes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import replace

import numpy as np
import pytest

from streamrl import wire
from streamrl.config import ImagesConfig, ModelConfig, RunConfig, SourceConfig
from streamrl.errors import DataError, RetryLater
from streamrl.images.encoded import accept, decode, names_of
from streamrl.images.store import ImageStore
from streamrl.producers import images
from streamrl.producers.dataset import PromptLimits, load_prompts
from streamrl.producers.episodes.environment import ToolEpisode
from streamrl.producers.episodes.episode import Episode, Task
from streamrl.producers.episodes.history import History
from streamrl.producers.episodes.known_models import known_renderer, renderer_of
from streamrl.producers.episodes.sampler import EpisodeSampler
from streamrl.producers.episodes.session import EpisodeSession
from streamrl.producers.images import SampleImages
from streamrl.producers.sampler import SampleOrder, SingleTurn, TurnJournal
from streamrl.producers.tokenizer import Tokenizer
from streamrl.queues import open_ledgers
from streamrl.store import Folder
from streamrl.wire import Prompt, pack_int32
from tests.queues.ledger_kit import admit, lease, take
from tests.vision_kit import KINDS, make_vision_model, picture

from .chat_kit import HERMES, make_tokenizer
from .episode_kit import Script, call, config_of

SIZES = [(40, 32), (100, 30), (8, 8), (64, 64), (1, 1), (31, 7)]
PICTURES = [picture(seed, *size) for seed, size in enumerate(SIZES)]
LOOK = '{"name": "look", "arguments": {"at": 0}}'
SMOLVLM = (
    "<|user|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""That of SmolVLM, with the marks of the kit: it takes lists of parts only."""
ROOM = {"model": {"context": 4096}, "sampling": {"max_new_tokens": 256}}


class Says(Script):
    end = "<|end|>"


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def shown(data):
    return {"type": "image_url", "image_url": {"url": url(data)}}


def name(data):
    return hashlib.sha256(data).hexdigest()


def part(data):
    return accept(data, RunConfig().images).part


def look(at: int) -> list[dict[str, object]]:
    """Look at a picture.

    Args:
        at: which.
    """
    LOOKED.append(at)
    return [{"type": "text", "text": "here: "}, shown(PICTURES[at]), "and no more"]


LOOKED: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_looked():
    LOOKED.clear()


def load(folder, kind):
    return Tokenizer.load(ModelConfig(path=str(make_vision_model(folder, kind))))


@pytest.fixture(scope="module", params=[*KINDS, "smolvlm's own"])
def tokenizer(request, tmp_path_factory):
    loaded = load(tmp_path_factory.mktemp("model"), request.param.partition("'")[0])
    if "own" in request.param:
        loaded.backend.chat_template = SMOLVLM
    return loaded


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), "qwen2_vl")


def order_of(tokenizer, *content, journal=None, store=None, inline=16 << 10):
    """A sample of a line of a data set with images."""
    images = [each["sha256"] for each in content if "sha256" in each]
    messages = [{"role": "user", "content": list(content)}]
    data = {name(each): each for each in PICTURES if name(each) in images}
    prompt = Prompt(
        v=wire.SCHEMA if images else 1,
        tokens=pack_int32(renderer_of(tokenizer).render(messages)),
        text="?",
        messages=messages,
        images=images,
        blobs=[each for each in data.values() if len(each) <= inline],
        processor=tokenizer.vision.fingerprint if images else "",
    )
    return SampleOrder(prompt, id="rollout.0-1", affinity="g0", journal=journal, store=store)


async def session_of(tokenizer, texts, order=None, **sections):
    engine = Says(tokenizer, texts)
    order = order or order_of(tokenizer, {"type": "text", "text": "see"}, part(PICTURES[0]))
    config = config_of({"tools": ["a:b"]}, **ROOM, **sections)
    session = EpisodeSession(config, engine, renderer_of(tokenizer), tokenizer, order)
    await session.images.open()
    return session, engine, Task.of(order.prompt).messages


def answered(data):
    return {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a<|end|>b"}, part(data)]}


@pytest.mark.parametrize("count", range(1, 7))
def test_a_turn_adds_what_the_whole_chat_has_and_processes_its_image_only(tokenizer, count):
    """Delta and full agree on ids, pixels and grids bit for bit; a counter says that each was processed once."""
    vision, renderer = tokenizer.vision, renderer_of(tokenizer)
    images = [accept(data, RunConfig().images) for data in PICTURES[:count]]
    messages = [{"role": "user", "content": [{"type": "text", "text": "see "}, images[0].part]}]
    ids = renderer.render(messages)
    vision._kept.clear()
    before, pixels = vision.processed, [vision.pixels(images[0].sha256, images[0].data)]
    for number, image in enumerate(images[1:], start=1):
        reply = tokenizer.plain_ids(f" reply {number}<|end|>")
        said = f" reply {number}".removeprefix(" " if tokenizer.backend.chat_template == SMOLVLM else "")
        messages.append({"role": "assistant", "content": said})
        ids += reply
        new = [answered(image.data)]
        ids += renderer.extend(messages, None, ids, new, sampled=len(reply))
        messages += new
        for seen in images[: number + 1]:  # an engine asks for all of them in each turn
            made = vision.pixels(seen.sha256, seen.data)
        pixels.append(made)
    assert ids == renderer.render(messages)
    assert vision.processed - before == count
    joined = vision.joined(pixels)
    opened = [decode(image.data) for image in images]
    full = vision._processor(opened if vision.axes == 3 else [opened], return_tensors="np")
    assert set(joined) >= {"pixel_values"}
    for key, array in joined.items():
        assert np.array_equal(array, full[key]), key
        assert array.dtype == full[key].dtype
    assert len(vision.spans(ids, [(image.width, image.height) for image in images])) == count


async def test_turns_with_images_are_recorded_and_asked_of_the_engine(tokenizer):
    session, engine, messages = await session_of(tokenizer, [" one", " two"])
    reply = await session.sampled(messages)
    messages += [reply.reply.message, {"role": "user", "content": [shown(PICTURES[1]), shown(PICTURES[2])]}]
    await session.sampled(messages)
    first, second = engine.requests
    assert [image.sha256 for image in first.images] == [name(PICTURES[0])]
    assert [image.data for image in second.images] == PICTURES[:3]
    sizes = SIZES[:3]
    ids = second.tokens.tolist()
    assert [(image.begin, image.count) for image in second.images] == tokenizer.vision.spans(ids, sizes)
    assert {image.placeholder for image in second.images} == {tokenizer.vision.token_id}
    assert first.forbidden == second.forbidden == tokenizer.vision.forbidden
    sample = wire.decode(wire.encode(session.sample()), wire.Sample)
    assert sample.v == wire.SCHEMA
    assert [turn.media for turn in sample.turns] == [[], [name(PICTURES[1]), name(PICTURES[2])], []]
    assert sample.blobs == PICTURES[1:3]
    assert names_of(sample.turns[2].messages) == sample.images
    assert b"base64" not in wire.encode(sample)


async def test_a_chat_without_an_image_forbids_placeholders_too_and_costs_what_it_did(tokenizer):
    session, engine, messages = await session_of(
        tokenizer, [" a", " b"], order_of(tokenizer, {"type": "text", "text": "?"})
    )
    reply = await session.sampled(messages)
    await session.sampled([*messages, reply.reply.message, {"role": "user", "content": "b?"}])
    assert [(request.images, request.forbidden) for request in engine.requests] == [
        ((), tokenizer.vision.forbidden)
    ] * 2
    assert session.sample().v == wire.TURNS
    assert session.sample().blobs == []


async def test_a_single_turn_gets_the_images_of_its_prompt(tokenizer):
    engine = Says(tokenizer, ["ok"])
    order = order_of(tokenizer, part(PICTURES[3]))
    await SingleTurn(RunConfig(), engine, tokenizer).sample(order)
    (request,) = engine.requests
    assert [(image.sha256, image.data) for image in request.images] == [(name(PICTURES[3]), PICTURES[3])]
    assert request.forbidden == tokenizer.vision.forbidden


async def test_an_image_is_decoded_once_however_often_it_is_sent(qwen, monkeypatch):
    accepted = []
    monkeypatch.setattr(images, "accept", lambda data, limits: accepted.append(data) or accept(data, limits))
    session, _, messages = await session_of(qwen, ["a", "b", "c"])
    asked = [*messages, {"role": "user", "content": [{"type": "text", "text": "?"}, shown(PICTURES[1])]}]
    for _ in range(3):
        reply = await session.sampled([dict(message) for message in asked])
        asked += [reply.reply.message, {"role": "user", "content": [shown(PICTURES[1])]}]
    assert accepted == [PICTURES[1]]
    assert session.forks == 0
    assert session.sample().images == [name(PICTURES[0]), *[name(PICTURES[1])] * 3]


def test_equal_tokens_with_another_image_are_another_branch(qwen):
    """Two images of one size have the same tokens."""
    renderer, one, other = renderer_of(qwen), picture(1), picture(2)
    asked = [{"role": "user", "content": [part(one)]}]
    ids = np.asarray(renderer.render(asked), dtype=np.int32)
    history = History(renderer, ids, [name(one)])
    assert history.place(asked).parent == wire.PROMPT
    place = history.place([{"role": "user", "content": [part(other)]}])
    assert (place.parent, place.images) == (wire.NOTHING, [name(other)])
    assert np.array_equal(place.ids, ids)


@pytest.mark.parametrize("role", ["tool", "user", "assistant", "system"])
async def test_a_placeholder_that_somebody_writes_is_text(tokenizer, role):
    """A reply, a tool or a user that spells out the mark of an image shows none."""
    mark = tokenizer.vision.token
    said = [{"role": "assistant", "content": "yes"}, {"role": role, "content": f"see {mark}{mark}"}]
    ids = renderer_of(tokenizer).render([{"role": "user", "content": [part(PICTURES[0])]}, *said])
    tokenizer.vision.spans(ids, SIZES[:1])
    assert tokenizer.decode(ids, special=True).count(f"see {mark}{mark}") == 1


async def test_what_tools_show_is_in_the_chat_and_their_texts_are_cut(qwen):
    episode = ToolEpisode([look])
    engine = Says(qwen, [call(LOOK), "done"])
    config = config_of({"tools": ["a:b"], "max_tool_response": 8}, **ROOM)
    async with EpisodeSampler(config, engine, qwen, episode) as sampler:
        sample = await sampler.sample(order_of(qwen, {"type": "text", "text": "?"}))
    assert sample.images == [name(PICTURES[0])]
    assert [image.data for image in engine.requests[1].images] == PICTURES[:1]
    (tool,) = [message for message in sample.turns[-1].messages if message["role"] == "tool"]
    assert [each["type"] for each in tool["content"]] == ["text", "image", "text"]
    assert tool["content"][0]["text"] == "here: "
    assert tool["content"][2]["text"] == "a\n[9 characters left out]\ne"


async def test_an_image_of_a_tool_that_cannot_be_used_is_told_to_the_model(qwen):
    def bad() -> list[dict[str, object]]:
        """Bad."""
        return [{"type": "image_url", "image_url": {"url": url(b"no image")}}]

    engine = Says(qwen, [call('{"name": "bad", "arguments": {}}'), "done"])
    async with EpisodeSampler(config_of({"tools": ["a:b"]}, **ROOM), engine, qwen, ToolEpisode([bad])) as sampler:
        sample = await sampler.sample(order_of(qwen, {"type": "text", "text": "?"}))
    assert [use.outcome for turn in sample.turns for use in turn.tools] == ["error"]
    assert "no image of a known format" in qwen.decode(engine.requests[1].tokens)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}], "no data: URL"),
        ([{"type": "image", "sha256": "0" * 64, "width": 8, "height": 8}], "does not have"),
        ([{"type": "image"}], "does not have"),
    ],
)
async def test_what_is_no_image_of_the_sample_is_refused(qwen, content, why):
    session, _, messages = await session_of(qwen, ["a"])
    with pytest.raises(DataError, match=why):
        await session.sampled([*messages, {"role": "user", "content": content}])
    with pytest.raises(DataError, match=why):
        await session.prompt_tokens([{"role": "user", "content": content}])


async def test_a_model_of_text_refuses_images():
    tokenizer = make_tokenizer(HERMES)
    prompt = Prompt(tokens=pack_int32([1, 2]), messages=[{"role": "user", "content": "?"}])
    session = EpisodeSession(
        config_of({"tools": ["a:b"]}),
        Script(tokenizer, []),
        renderer_of(tokenizer),
        tokenizer,
        SampleOrder(prompt, id="s"),
    )
    with pytest.raises(DataError, match="'image_url', this model takes text"):
        await session.sampled([{"role": "user", "content": [shown(PICTURES[0])]}])
    order = SampleOrder(Prompt(v=3, tokens=pack_int32([1]), images=[name(PICTURES[0])], processor="x"), id="s")
    with pytest.raises(DataError, match="the model takes text alone"):
        await SingleTurn(RunConfig(), Script(tokenizer, []), tokenizer).sample(order)


async def test_prompts_that_another_processor_counted_are_left_to_other_workers(qwen, monkeypatch):
    monkeypatch.setattr(images, "_PAUSE", 0.0)
    order = order_of(qwen, part(PICTURES[0]))
    other = wire.decode(wire.encode(order.prompt), Prompt)
    other = Prompt(**{**{field: getattr(other, field) for field in other.__struct_fields__}, "processor": "0" * 16})
    engine = Says(qwen, ["ok"])
    with pytest.raises(RetryLater, match=f"processor {'0' * 16}, this worker has {qwen.vision.fingerprint}"):
        await SingleTurn(RunConfig(), engine, qwen).sample(replace(order, prompt=other))
    assert not engine.requests


async def test_a_store_that_is_full_costs_no_sample(qwen, tmp_path, monkeypatch):
    """A file stands where the folder of the store should be: the lease goes back, and the next try finds room."""
    monkeypatch.setattr(images, "_PAUSE", 0.0)
    store = ImageStore(ImagesConfig(inline=0), Folder(tmp_path / "images"))
    (tmp_path / "images").write_text("")
    found = SampleImages(RunConfig(), order_of(qwen).prompt, qwen.vision, store)
    asked = [{"role": "user", "content": [shown(PICTURES[0])]}]
    with pytest.raises(RetryLater, match="the store of images is away or full"):
        await found.canonical(asked)
    (tmp_path / "images").unlink()
    (message,) = await found.canonical(asked)
    assert message["content"] == [part(PICTURES[0])]
    assert store.read([name(PICTURES[0])], []) == {name(PICTURES[0]): PICTURES[0]}


async def test_an_agent_may_send_back_what_it_was_shown(qwen):
    """Also an image that became larger than `images.largest` when it was written anew."""
    image, config = part(PICTURES[0]), RunConfig.model_validate({"images": {"largest": 10}})
    found = SampleImages(config, order_of(qwen, image).prompt, qwen.vision, None)
    await found.open()
    given = found.outside([{"role": "user", "content": [image]}])
    assert (await found.canonical(given))[0]["content"] == [image]
    with pytest.raises(DataError, match=r"images\.largest is 10"):
        await found.canonical([{"role": "user", "content": [shown(PICTURES[1])]}])


async def test_an_image_that_was_deleted_is_named_and_large_ones_are_read_where_they_are(qwen, tmp_path):
    config = RunConfig.model_validate({"name": "t", "images": {"inline": 0}})
    store = ImageStore.of(config, tmp_path)
    order = order_of(qwen, part(PICTURES[0]), store=store, inline=0)
    assert order.prompt.blobs == []
    engine = Says(qwen, ["ok"])
    with pytest.raises(DataError, match=f"the image {name(PICTURES[0])[:12]} is not in"):
        await SingleTurn(config, engine, qwen).sample(order)
    store.keep({name(PICTURES[0]): PICTURES[0]})
    await SingleTurn(config, engine, qwen).sample(order)
    assert [image.data for image in engine.requests[0].images] == PICTURES[:1]


def test_renderers_of_names_are_not_used_for_images(qwen, monkeypatch):
    monkeypatch.setattr(qwen.backend, "name_or_path", "Qwen/Qwen2-VL-2B-Instruct", raising=False)
    assert known_renderer(qwen, "qwen3_vl") is None


def test_a_text_with_placeholders_is_no_task_of_an_episode(qwen, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "<|image_pad|>", "images": ["a.png"]}')
    (prompt,) = load_prompts([SourceConfig(source=path)], qwen, PromptLimits(900, 1000)).prompts
    with pytest.raises(DataError, match="an episode on a `prompt` with `images`"):
        Task.of(wire.decode(prompt, Prompt))


class Agentless(Episode):
    """Shows pictures of its own, turn by turn."""

    def __init__(self, count):
        self.count = count

    async def run(self, task, chat):
        messages = task.messages
        for data in PICTURES[: self.count]:
            messages += [(await chat(messages)).message, {"role": "user", "content": [shown(data)]}]
        await chat(messages)
        return 1.0


async def test_the_messages_for_programs_elsewhere_are_of_openai(qwen):
    session, _, messages = await session_of(qwen, [])
    (message,) = session.images.outside(messages)
    assert message["content"] == [{"type": "text", "text": "see"}, shown(PICTURES[0])]
    (again,) = await session.images.canonical([message])
    assert again == messages[0]


# ---- a process that takes over


@pytest.fixture
async def ledger(redis_run):
    async with open_ledgers(RunConfig(name="t", redis=redis_run.config), redis_run.run_dir) as ledgers:
        yield ledgers.train


class Dying(Says):
    def __init__(self, tokenizer, texts, hangs):
        super().__init__(tokenizer, texts)
        self.hangs = hangs

    async def generate(self, request):
        if not self.texts:
            self.hangs.set()
            await asyncio.Event().wait()
        return await super().generate(request)


@pytest.mark.parametrize("inline", [0, 1 << 20], ids=["files", "travelling"])
@pytest.mark.parametrize("episode", [ToolEpisode([look]), Agentless(2)], ids=["tools", "code"])
async def test_a_process_that_takes_over_has_the_images_of_recorded_turns(ledger, qwen, tmp_path, inline, episode):
    limits = {"images": {"inline": inline}}
    config = config_of({"tools": ["a:b"], "deterministic": True}, **ROOM, **limits)
    texts = [call(LOOK), call(LOOK), "done"]
    await admit(ledger, 0)
    (held,) = await lease(ledger, "prompts")
    hangs = asyncio.Event()

    def made(engine):
        store = ImageStore.of(config, tmp_path)
        order = order_of(qwen, part(PICTURES[5]), journal=TurnJournal(held, 0, lambda _: None), store=store)
        return EpisodeSampler(config, engine, qwen, episode), order

    sampler, order = made(Dying(qwen, texts[:2], hangs))
    async with sampler:
        task = asyncio.create_task(sampler.sample(order))
        await asyncio.wait_for(hangs.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    calls = list(LOOKED)
    held = await take(ledger, "prompts", held, "worker-2")
    engine = Says(qwen, texts[2:])
    sampler, order = made(engine)
    async with sampler:
        sample = await sampler.sample(order)
    assert calls == LOOKED, "no recorded tool ran again"
    assert sample.replayed == 2
    expected = [PICTURES[0], PICTURES[0]] if LOOKED else PICTURES[:2]
    assert sample.images == [name(data) for data in expected]
    assert [image.data for image in engine.requests[0].images] == [PICTURES[5], *expected]
    assert sample.blobs == (list(dict.fromkeys(expected)) if inline else [])
    assert {path.name for path in (tmp_path / "images").glob("*")} == (set() if inline else set(sample.images))
