"""Options of a call at the endpoint: how a reply is drawn, what ends it, how many there are, and long answers."""

from __future__ import annotations

import gc
import json

import aiohttp
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.errors import DataError, DeadlyRequest
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.episodes.endpoint import server
from streamrl.producers.episodes.endpoint.calls import AgentCall
from streamrl.producers.tokenizer import Tokenizer
from streamrl.wire import NOTHING, PROMPT

from .chat_kit import LOOK_UP, asked
from .endpoint_kit import ASKED, TOKENIZER, post
from .episode_kit import call, config_of, save_talker

CALLED = call('{"name": "look_up", "arguments": {"word": "zebra", "deep": false}}', text="wait")
BROKEN = call('{"name": "look_up", "arguments": {"word": ')
FLAT = {"type": "function", **LOOK_UP["function"]}
HI = {"messages": ASKED, "max_tokens": 9}


async def test_all_that_is_named_may_be_ignored(serve):
    named = ["temperature", "n", "stop", "logprobs", "response_format", "tool_choice"]
    served = await serve("six.", agent={"ignore": named})
    form = {"type": "json_object"}
    options = {
        "temperature": 0,
        "n": 3,
        "stop": ".",
        "logprobs": True,
        "response_format": form,
        "tool_choice": "required",
    }
    answer = await served.ask(tools=[LOOK_UP], **options)
    assert [(choice.message.content, choice.logprobs) for choice in answer.choices] == [("six.", None)]
    (request,) = served.engine.requests
    assert (request.temperature, request.stop, request.json_schema) == (1.0, (), "")


# --- options of a call that are obeyed --------------------------------------------------------------------------------


@pytest.mark.parametrize("back", ["think", "think\nObservation:", "\nthink "])
async def test_a_text_ends_a_reply_and_an_agent_goes_on_with_it_or_without_it(serve, back):
    """Agents strip what the model wrote, and smolagents puts the text back."""
    served = await serve("think\nObservation: it rains", "done")
    first = (await served.ask(stop=["\nObservation:", ""])).choices[0]
    assert (first.message.content, first.finish_reason) == ("think", "stop")
    await served.ask([*ASKED, {"role": "assistant", "content": back}, asked("Observation: sun")], stop="\nObservation:")
    assert served.session.forks == 0
    first, second = served.engine.requests
    assert first.stop == ("\nObservation:",)
    said = TOKENIZER.decode(second.tokens[len(first.tokens) :].tolist(), special=True)
    assert said.startswith("think\nObservation:<|im_end|>\n<|im_start|>user\nObservation: sun")
    sample = served.session.sample()
    count = sample.turns[0].sampled
    assert second.tokens[len(first.tokens) :][:count].tolist() == sample.token_ids[:count].tolist()
    assert sample.token_logprobs[:count].tolist() == [-float(at) for at in range(1, count + 1)]


def parts(role, text):
    return {"role": role, "content": [{"type": "text", "text": text}]}


async def test_a_code_agent_of_smolagents_continues_one_branch(serve):
    """What `CodeAgent` of smolagents 1.26 sends: it puts the text back that ended the reply, and its call behind it."""
    served = await serve("Thought: add\n<code>\nprint(1 + 2)\n</code> and more", "<code>\nfinal_answer(3)\n</code>")
    stop = ["Observation:", "Calling tools:", "</code>"]
    messages = [parts("system", "You write code."), parts("user", "New task:\nwhat is 1 + 2?")]
    status, answer = await post(served, {"model": "policy", "messages": messages, "stop": stop})
    said = answer["choices"][0]["message"]["content"]
    assert (status, said) == (200, "Thought: add\n<code>\nprint(1 + 2)\n")
    ran = "{'id': 'call_1', 'type': 'function', 'function': {'name': 'python_interpreter', 'arguments': '3'}}"
    messages += [parts("assistant", f"{said}</code>\nCalling tools:\n[{ran}]"), parts("user", "Observation:\n3")]
    await post(served, {"model": "policy", "messages": messages, "stop": stop})
    assert served.session.forks == 0
    assert [turn.parent for turn in served.session.sample().turns] == [NOTHING, 0, 1, 2]
    first, second = served.engine.requests
    count = served.session.sample().turns[1].sampled
    rest = TOKENIZER.decode(second.tokens[len(first.tokens) + count :].tolist(), special=True)
    assert rest.startswith("\nCalling tools:\n[{'id': 'call_1'")


async def test_anthropic_says_which_text_ended_a_reply(serve):
    served = await serve("think\nObservation: x", "y")
    _, said = await post(served, {**HI, "max_tokens": 60, "stop_sequences": ["no", "Observation:"]}, "messages")
    assert (said["content"][0]["text"], said["stop_reason"]) == ("think\n", "stop_sequence")
    assert said["stop_sequence"] == "Observation:"
    _, said = await post(served, {**HI, "stop_sequences": ["no"]}, "messages")
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_of_one_call_are_branches(serve, stream):
    served = await serve("six", "seven", "then", max_turns=9)
    if stream:
        async with served.client.chat.completions.stream(model="any", messages=ASKED, n=2) as events:
            answer = await events.get_final_completion()
    else:
        answer = await served.ask(n=2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "six"), (1, "seven")]
    await served.ask([*ASKED, answer.choices[1].message, asked("and?")])
    assert served.session.forks == 1
    assert (await served.said())[0] == ["six", "seven", "then"]
    assert [turn.parent for turn in served.session.sample().turns] == [PROMPT, PROMPT, 1, 2]


async def test_if_one_of_several_answers_cannot_be_sampled_none_is_kept(serve):
    served = await serve("six", "a", "b", max_sampled_tokens=5)
    await served.ask(max_tokens=3)
    with pytest.raises(openai.APIStatusError, match="max_sampled_tokens 5"):
        await served.ask([asked("more")], n=2, max_tokens=3)
    assert (await served.said())[0] == ["six"]


async def test_more_answers_than_the_episode_has_turns_left_are_refused_and_it_goes_on(serve):
    served = await serve("six", "seven", "eight", max_turns=3)
    await served.ask()
    with pytest.raises(openai.BadRequestError, match=r"`n` .*2 turn\(s\) left \(episode.max_turns\)"):
        await served.ask([asked("more")], n=3)
    await served.ask([asked("more")], n=2)
    with pytest.raises(openai.APIStatusError, match="max_turns 3"):
        await served.ask([asked("more")], n=2)
    assert (await served.said())[0] == ["six", "seven", "eight"]


async def test_a_repeat_of_a_call_for_several_answers_gets_them_whatever_is_left(serve):
    served = await serve("six", "seven", max_turns=3)
    first = await served.ask(n=2)
    again = await served.ask(n=2, extra_headers={"x-stainless-retry-count": "1"})
    assert again.choices == first.choices


async def test_what_a_call_said_is_kept_no_longer_than_its_answer_takes(serve):
    served = await serve("six")
    await served.ask()
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, AgentCall)]


async def test_log_probabilities_of_the_sampled_tokens(serve):
    served = await serve("it is six", "\N{SNOWMAN}")
    told = (await served.ask(logprobs=True)).choices[0].logprobs.content
    assert "".join(one.token for one in told) == "it is six<|im_end|>"
    assert [one.logprob for one in told] == served.session.sample().token_logprobs.tolist()
    assert bytes(value for one in told for value in one.bytes).decode() == "it is six<|im_end|>"
    told = (await served.ask(logprobs=True)).choices[0].logprobs.content
    assert [one.bytes for one in told[:-1]] == [None] * 3, "parts of a character"


async def test_an_agent_says_how_its_replies_are_drawn(serve):
    served = await serve(*"abc", max_turns=9)
    await served.ask(temperature=0.5, top_p=0.9, extra_body={"top_k": 5})
    await post(served, {**HI, "temperature": 0.25}, "messages")
    await post(served, {"input": "x"}, "responses")
    drawn = [(request.temperature, request.top_p, request.top_k) for request in served.engine.requests]
    assert drawn == [(0.5, 0.9, 5), (0.25, 1.0, 0), (1.0, 1.0, 0)]
    for ignore, top_k in (["strict"], 0), (["top_k"], 7):
        served = await serve("a", agent={"ignore": ignore}, sections={"sampling": {"top_k": 7}})
        await served.ask(extra_body={"top_k": -1})
        assert served.engine.requests[0].top_k == top_k


async def test_a_real_model_tells_the_log_probabilities_of_what_each_call_drew_from(serve, tmp_path):
    """Those of every token equal a plain forward pass at the temperature of its call, within what `top_p` left."""
    save_talker(tmp_path)
    sections = {"model": {"path": str(tmp_path), "context": 512}, "engine": {"threads": 1}}
    config = config_of({}, **sections)
    tokenizer, engine = Tokenizer.load(config.model), HfEngine(config, 1)
    await engine.start()
    try:
        served = await serve(engine=engine, tokenizer=tokenizer, sections=sections, max_turns=64)
        draws = [{"temperature": 4.0, "n": 2}, {"temperature": 3.0, "top_p": 0.5}, {}]
        for draw in draws:
            await served.ask(max_tokens=12, **draw)
        while (choice := (await served.ask(stop="is")).choices[0]).message.content != "it ":
            assert choice.message.content.startswith("<tool_call>")
        assert choice.finish_reason == "stop"
        said = {"role": "assistant", "content": "it"}
        await served.ask([*ASKED, said, asked("and?")])
        sample = served.session.sample()
    finally:
        await engine.close()
    model, turns, paths, at = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), sample.turns, {}, 0
    drawn = [draws[0], *draws]
    prompt = served.session._order.prompt.token_ids.tolist()
    for number, turn in enumerate(turns):
        own = sample.token_ids[at : at + turn.sampled].tolist() if turn.sampled else turn.observed_ids.tolist()
        before = prompt if turn.parent == PROMPT else paths[turn.parent]
        paths[number] = [*before, *own]
        if not turn.sampled:
            continue
        draw = drawn.pop(0) if drawn else {}
        with torch.no_grad():
            logits = model(torch.tensor([paths[number]])).logits[0, len(before) - 1 : -1]
        logprobs = (logits / draw.get("temperature", 1.0)).log_softmax(-1)
        ordered, order = logprobs.double().exp().sort(descending=True, stable=True)
        kept = ordered.cumsum(-1) - ordered < draw.get("top_p", 1.0)
        kept = torch.zeros_like(kept).scatter(-1, order, kept)
        expected = logprobs.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(-1, torch.tensor(own)[:, None])[:, 0]
        np.testing.assert_allclose(sample.token_logprobs[at : at + turn.sampled], expected.numpy(), atol=1e-4)
        at += turn.sampled
    last = turns[-1]
    assert paths[last.parent][: -len(turns[last.parent].observed_ids)] == paths[turns[last.parent].parent]
    ended = tokenizer.decode(paths[turns[last.parent].parent], special=True)
    assert ended.endswith("it is three")  # the token that holds the text, as it was sampled


REMOTE = {"kind": "openai", "url": ["http://127.0.0.1:9"]}


async def test_what_an_engine_does_not_tell_is_refused_for_training_alone(serve):
    served = await serve("six", sections={"engine": REMOTE})
    with pytest.raises(openai.BadRequestError, match=r"`temperature`.* openai server may not be.* processed-logprobs"):
        await served.ask(temperature=0.5)
    await served.ask(temperature=1)
    served = await serve("six", sections={"engine": {"kind": "sglang"}})
    with pytest.raises(openai.BadRequestError, match=r"`top_p`.* sglang tells"):
        await served.ask(top_p=0.5)
    for options in ({"temperature": 0}, {"temperature": 0.5, "top_p": 0.5}):
        served = await serve("six", sections={"engine": REMOTE}, evaluation=True)
        await served.ask(**options)
        assert served.engine.requests[0].temperature == options["temperature"]


async def test_a_schema_goes_to_servers_that_keep_replies_to_it(serve):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    served = await serve(*"abc", sections={"engine": {"kind": "vllm"}}, max_turns=9)
    await served.ask(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    await served.ask(response_format={"type": "json_object"})
    form = {"type": "json_schema", "name": "x", "schema": schema}
    await served.client.responses.create(model="any", input="x", text={"format": form})
    schemas = [json.loads(request.json_schema) for request in served.engine.requests]
    assert schemas == [schema, {"type": "object"}, schema]


async def test_a_schema_that_does_not_compile_is_refused_and_the_episode_goes_on(serve):
    refused = DataError("the server refuses the request: no such type")
    served = await serve(refused, "six", sections={"engine": {"kind": "vllm"}}, max_turns=1)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integr"}}}
    with pytest.raises(openai.BadRequestError, match=r"`response_format`: the engine refuses .*no such type"):
        await served.ask(response_format=form)
    await served.ask()
    assert (await served.said())[0] == ["six"]


async def test_a_call_with_a_schema_that_engines_die_of_ends_the_episode(serve):
    died = DeadlyRequest("3 engines were lost under it")
    served = await serve(died, "six", sections={"engine": {"kind": "vllm"}})
    with pytest.raises(openai.APIStatusError) as caught:
        await served.ask(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {}}})
    assert "response_format" not in str(caught.value)
    assert served.session.fault is died


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_a_stream_is_kept_alive_while_its_answer_is_sampled(serve, path, monkeypatch):
    monkeypatch.setattr(server, "_PING_SECONDS", 0.02)
    served = await serve("six")
    served.engine.open.clear()
    body = {"input": "x"} if path == "responses" else HI
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {served.key}"}) as client,
        client.post(f"{served.url}/v1/{path}", json={**body, "stream": True}) as response,
    ):
        first = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        assert first == [server._APIS[f"/v1/{path}"].ping] * 2
        served.engine.open.set()
        assert "six" in (await response.text())
    assert (await served.said())[0] == ["six"]


async def test_what_fails_behind_the_head_of_a_stream_is_its_last_event(serve, monkeypatch):
    monkeypatch.setattr(server, "_PING_SECONDS", 0.02)
    served = await serve(None)
    served.engine.open.clear()
    stream = await served.ask(stream=True)
    served.engine.open.set()
    with pytest.raises(openai.APIError, match="the policy cannot answer"):
        _ = [chunk async for chunk in stream]
