"""The endpoint of one sample, asked by the `openai` package: what is answered, refused, repeated, and recorded."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import openai
import pytest
from producer_kit import until

from streamrl.errors import Unreachable
from streamrl.producers.episodes.endpoint import server
from streamrl.producers.episodes.endpoint.server import AgentEndpoint
from streamrl.wire import PROMPT

from .chat_kit import KEEPS_THINKING, LOOK_UP, answered, asked, make_tokenizer
from .endpoint_kit import ASKED, Served, post
from .episode_kit import call

CALLED = call('{"name": "look_up", "arguments": {"word": "zebra", "deep": false}}', text="wait")
BROKEN = call('{"name": "look_up", "arguments": {"word": ')
FLAT = {"type": "function", **LOOK_UP["function"]}


# --- the ways to ask: each plays a call of a tool and its answer, and returns what was said ---------------------------


async def chat(served):
    first = (await served.ask(tools=[LOOK_UP])).choices[0]
    messages = [*ASKED, first.message, answered("grass", first.message.tool_calls[0].id)]
    last = (await served.ask(messages, tools=[LOOK_UP])).choices[0]
    return first.message.content, first.message.tool_calls[0].function, first.finish_reason, last.message.content


async def chat_streamed(served):
    async def ask(messages):
        async with served.client.chat.completions.stream(
            model="any", messages=messages, tools=[LOOK_UP], stream_options={"include_usage": True}
        ) as stream:
            done = await stream.get_final_completion()
        assert done.usage.completion_tokens > 1
        return done.choices[0]

    first = await ask(ASKED)
    last = await ask([*ASKED, first.message, answered("grass", first.message.tool_calls[0].id)])
    return first.message.content, first.message.tool_calls[0].function, first.finish_reason, last.message.content


async def responses(served, stream=False):
    async def ask(given):
        if not stream:
            return await served.client.responses.create(model="any", input=given, tools=[FLAT])
        async with served.client.responses.stream(model="any", input=given, tools=[FLAT]) as events:
            return await events.get_final_response()

    first = await ask(ASKED)
    function = first.output[1]
    output = {"type": "function_call_output", "call_id": function.call_id, "output": "grass"}
    echoed = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    last = await ask([*ASKED, *echoed, output])
    return first.output_text, function, "tool_calls", last.output_text


async def responses_streamed(served):
    return await responses(served, stream=True)


async def anthropic(served, stream=False):
    tool = {"name": "look_up", "description": "Look up.", "input_schema": LOOK_UP["function"]["parameters"]}

    async def ask(messages):
        body = {"model": "any", "max_tokens": 64, "messages": messages, "tools": [tool], "stream": stream}
        async with (
            aiohttp.ClientSession(headers={"x-api-key": served.key, "Authorization": "Bearer EMPTY"}) as client,
            client.post(f"{served.url}/v1/messages", json=body) as response,
        ):
            if not stream:
                return await response.json()
            return joined([json.loads(line[5:]) for line in (await response.text()).split("\n") if line[:5] == "data:"])

    first = await ask(ASKED)
    text, use = first["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "grass"}]}
    last = await ask([*ASKED, {"role": "assistant", "content": [text, use]}, {"role": "user", "content": [result]}])
    function = openai.types.chat.chat_completion_message_function_tool_call.Function(
        name=use["name"], arguments=json.dumps(use["input"])
    )
    return text["text"], function, {"tool_use": "tool_calls"}[first["stop_reason"]], last["content"][0]["text"]


def joined(events):
    """The message that a stream of Anthropic's API spells."""
    message = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        if event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if "text" in delta:
                block["text"] += delta["text"]
            else:
                block["input"] = json.loads(delta["partial_json"])
        if event["type"] == "message_delta":
            message |= event["delta"]
    return message


async def anthropic_streamed(served):
    return await anthropic(served, stream=True)


@pytest.mark.parametrize("play", [chat, chat_streamed, responses, responses_streamed, anthropic, anthropic_streamed])
async def test_each_api_says_the_same_and_is_recorded_with_exact_tokens(serve, play):
    served = await serve(CALLED, "it eats grass")
    text, function, finish, last = await play(served)
    assert (text, finish, last) == ("wait", "tool_calls", "it eats grass")
    assert (function.name, json.loads(function.arguments)) == ("look_up", {"word": "zebra", "deep": False})
    sampled = [served.engine.ids(f"{said}<|im_end|>").tolist() for said in (CALLED, "it eats grass")]
    sample = served.session.sample()
    assert sample.token_ids.tolist() == [*sampled[0], *sampled[1]]
    assert [turn.sampled for turn in sample.turns] == [0, len(sampled[0]), 0, len(sampled[1])]
    assert [turn.parent for turn in sample.turns[1:]] == [0, 1, 2]
    assert [use.name for use in sample.turns[2].tools] == ["look_up"]
    assert served.session.forks == 0
    first, second = served.engine.requests
    head = [*first.tokens.tolist(), *sampled[0]]
    assert second.tokens.tolist()[: len(head)] == head


async def test_a_malformed_call_comes_as_it_was_written_and_can_be_answered(serve):
    served = await serve(BROKEN, "sorry")
    message = (await served.ask(tools=[LOOK_UP])).choices[0].message
    (wrong,) = message.tool_calls
    assert '{"word": ' in wrong.function.arguments
    await served.ask([*ASKED, message, answered("no JSON", wrong.id)], tools=[LOOK_UP])
    assert served.session.forks == 0


async def test_thinking_is_told_apart_and_need_not_come_back(serve):
    tokenizer = make_tokenizer(KEEPS_THINKING, eos="<|im_end|>")
    served = await serve("<think>\nhm\n</think>\n\nsix", "seven", tokenizer=tokenizer)
    message = (await served.ask()).choices[0].message
    assert (message.content, message.reasoning_content) == ("six", "hm")
    await served.ask([*ASKED, {"role": "assistant", "content": "six"}, asked("and then?")])
    assert served.session.forks == 0


# --- what is refused --------------------------------------------------------------------------------------------------

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 0}, "n"),
        ({"logprobs": True, "top_logprobs": 2}, "`top_logprobs`.* only those of the sampled tokens"),
        ({"response_format": {"type": "json_object"}}, "`response_format`.* engine.kind hf keeps no reply to a schema"),
        ({"response_format": {"type": "grammar"}}, "`response_format`.* its type is 'grammar'"),
        ({"tools": [LOOK_UP], "tool_choice": "required"}, r"`tool_choice`.*forces.*ignore: \[tool_choice\]"),
        ({"tool_choice": {"type": "function", "function": {"name": "look_up"}}}, "`tool_choice`"),
        ({"temperature": 0}, r"`temperature`.* samples of a group are alike.*ignore: \[temperature\]"),
        ({"temperature": -1}, "temperature"),
        ({"seed": 1}, "`seed`"),
        ({"presence_penalty": 0.5}, "`presence_penalty`"),
        ({"tools": [{"type": "function", "function": {**LOOK_UP["function"], "strict": True}}]}, "`strict`"),
        ({"reasoning_effort": "high"}, "`reasoning_effort`"),
        ({"extra_body": {"stop_token_ids": [1]}}, "`stop_token_ids`"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "`guided_json`"),
        ({"extra_body": {"min_tokens": 2}}, "`min_tokens`"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, r"ignore: \[chat_template_kwargs\]"),
        ({"messages": IMAGE}, "'image_url'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [asked("zebra " * 600)]}, "maximum context length"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_words_and_records_nothing(serve, options, said):
    served = await serve("six", agent={"ignore": []})
    with pytest.raises(openai.BadRequestError, match=said):
        await served.ask(**options)
    assert (await served.ask()).choices[0].message.content == "six"
    assert len(served.engine.requests) == 1


HI = {"messages": ASKED, "max_tokens": 9}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("messages", {**HI, "output_config": {"effort": "low"}}, "`output_config`"),
        ("messages", {**HI, "tools": [SERVER_TOOL]}, "'web_search_20250305'"),
        ("messages", {**HI, "mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "`mcp_servers`"),
        ("messages", {**HI, "messages": [*ASKED, {"role": "assistant", "content": "{"}]}, "`prefill`"),
        ("messages", {**HI, "tool_choice": {"type": "any"}}, "`tool_choice`"),
        ("messages", {**HI, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "`thinking`"),
        ("messages", {**HI, "tools": [{"name": "f", "input_schema": {}, "strict": True}]}, "`strict`"),
        ("responses", {"input": "x", "max_tool_calls": 2}, "`max_tool_calls`"),
        ("responses", {"input": "x", "tools": [{**FLAT, "strict": True}]}, "`strict`"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "'web_search'"),
        ("responses", {"input": "x", "truncation": "auto"}, "`truncation`"),
        ("responses", {"input": "x", "reasoning": {"effort": "low"}}, "`reasoning`"),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, "`previous_response_id`"),
        ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "`response_format`"),
        ("responses", {"input": "x", "text": {"verbosity": "low"}}, "`text.verbosity`"),
        ("responses", {"input": "x", "tool_choice": "required"}, "`tool_choice`"),
    ],
)
async def test_options_of_other_apis_that_cannot_be_obeyed_are_refused_by_name(serve, path, body, said):
    served = await serve(agent={"ignore": []})
    status, answer = await post(served, body, path)
    assert (status, said in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (
            "chat/completions",
            {"n": 1, "stop": [], "logprobs": False, "temperature": 1, "top_k": -1, "response_format": {"type": "text"}},
        ),
        ("chat/completions", {"stop": None, "store": False, "user": "me", "tool_choice": "auto", "no_such": None}),
        ("messages", {"stop_sequences": [], "thinking": {"type": "disabled"}, "top_k": 5, "metadata": {}}),
        ("responses", {"text": {"format": {"type": "text"}}, "store": True, "include": [], "truncation": "disabled"}),
    ],
)
async def test_options_that_ask_for_nothing_or_belong_to_the_run_are_taken(serve, path, more):
    served = await serve("six")
    body = {"input": "x"} if path == "responses" else HI
    assert (await post(served, {**body, **more}, path))[0] == 200


async def test_a_run_may_ignore_options(serve):
    served = await serve("six", agent={"ignore": ["guided_json"]})
    tool = {"type": "function", "function": {**LOOK_UP["function"], "strict": True}}
    with pytest.raises(openai.BadRequestError, match="`strict`"):
        await served.ask(tools=[tool])
    answer = await (await serve("six", agent={})).ask(tools=[tool])  # what agent packages set by themselves
    assert answer.choices[0].message.content == "six"
    answer = await served.ask(extra_body={"guided_json": {}})
    assert answer.choices[0].message.content == "six"
    with pytest.raises(openai.BadRequestError, match="`guided_regex`"):
        await served.ask(extra_body={"guided_regex": "x"})


async def test_of_two_calls_one_is_given_if_the_agent_wants_one_at_a_time(serve):
    two = call(*['{"name": "look_up", "arguments": {}}'] * 2)
    served = await serve(two, two, two, "done", max_turns=9)
    message = (await served.ask(tools=[LOOK_UP], parallel_tool_calls=False)).choices[0].message
    assert len(message.tool_calls) == 1
    answer = await served.client.responses.create(model="any", input="x", tools=[FLAT], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["function_call"]
    tool = {"name": "look_up", "input_schema": LOOK_UP["function"]["parameters"]}
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    _, said = await post(served, {**HI, "tools": [tool], "tool_choice": choice}, "messages")
    assert [block["type"] for block in said["content"]] == ["tool_use"]
    await served.ask([*ASKED, message, answered("grass", message.tool_calls[0].id)], tools=[LOOK_UP])
    head = [*served.engine.requests[0].tokens.tolist(), *served.engine.ids(f"{two}<|im_end|>").tolist()]
    assert served.engine.requests[-1].tokens.tolist()[: len(head)] == head


async def test_the_last_turn_without_tools_keeps_the_tokens_of_the_history(serve):
    """Its tools stay in the prompt, and what it writes like a call is text."""
    served = await serve(CALLED, CALLED)
    message = (await served.ask(tools=[LOOK_UP])).choices[0].message
    messages = [*ASKED, message, answered("grass", message.tool_calls[0].id)]
    last = (await served.ask(messages, tools=[LOOK_UP], tool_choice="none")).choices[0]
    assert (last.message.content, last.message.tool_calls, last.finish_reason) == (CALLED, None, "stop")
    assert served.session.forks == 0
    assert [turn.parent for turn in served.session.sample().turns[1:]] == [0, 1, 2]


async def test_an_agent_without_tools_gets_its_own_protocol_as_text(serve):
    served = await serve(CALLED)
    message = (await served.ask()).choices[0].message
    assert (message.content, message.tool_calls) == (CALLED, None)


async def test_bodies_that_are_no_call(serve):
    served = await serve()
    for path, body, status in (
        ("chat/completions", b"{", 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "user": "\xff"}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e999}', 400),
        ("streamrl/reward", b'{"\xff": 1}', 400),
        ("responses", b'{"input": []}', 400),
        ("messages", b'{"messages": [1]}', 400),
        ("chat/completions", b'{"messages": "' + b"x" * (9 << 20), 413),
        ("streamrl/reward", b"[" * 5000, 413),
        ("embeddings", b"{}", 404),
    ):
        headers = {"Authorization": f"Bearer {served.key}"}
        url = f"{served.url}/v1/{path}"
        async with aiohttp.ClientSession(headers=headers) as client, client.post(url, data=body) as response:
            assert (path, response.status) == (path, status)
            assert (await response.json())["error"]["message"]


async def test_a_wrong_key_is_told_nothing(serve):
    served = await serve("six")
    for key in ("sk-wrong", served.key[:-1], served.key.upper()):
        async with served.made(key) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await served.ask(client=client)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
    assert caught.value.body["code"] == "invalid_api_key"
    assert served.engine.requests == []


async def test_keys_of_two_samples_lead_to_two_records(serve):
    first, second = await serve("one"), await serve("two")
    second.url = first.url  # another replica's endpoint does not know the key
    with pytest.raises(openai.AuthenticationError):
        await second.ask(client=second.made())
    assert (await first.ask()).choices[0].message.content == "one"


async def test_calls_after_the_end_are_refused_for_good(serve):
    served = await serve("six", max_turns=1)
    await served.ask()
    for _ in range(2):  # the limit is reached, then known
        with pytest.raises(openai.APIStatusError, match=r"episode\.max_turns|has ended \(max_turns\)") as caught:
            await served.ask([*ASKED, asked()])
        assert caught.value.status_code == 410
    assert served.door.over.is_set()


async def test_a_key_whose_sample_has_ended_is_told_so():
    served = Served(["six"])
    async with served.open(), AgentEndpoint.open("127.0.0.1") as endpoint:
        with endpoint.serving(served.door) as key:
            pass
        served.url = endpoint.url
        with pytest.raises(openai.APIStatusError, match="has ended") as caught:
            await served.ask(client=served.made(key))
    assert caught.value.status_code == 410


async def test_an_engine_that_dies_is_a_503_and_a_fault_of_the_session(serve):
    served = await serve(Unreachable("gone"))
    with pytest.raises(openai.InternalServerError, match="Unreachable"):
        await served.ask()
    assert isinstance(served.session.fault, Unreachable)
    assert served.door.over.is_set()


async def test_calls_above_the_limit_wait_for_a_place(serve):
    words = [str(number) for number in range(40)]
    served = await serve(*words, max_turns=64, agent={"max_calls": 2})
    served.engine.open.clear()
    calls = [asyncio.create_task(served.ask([*ASKED, asked(word)])) for word in words]
    await served.engine.until(2)
    served.engine.open.set()
    assert {(await each).choices[0].message.content for each in calls} == set(words)
    assert served.door.idle.is_set()


async def test_calls_that_wait_for_a_place_are_told_of_the_end(serve):
    served = await serve("one", agent={"max_calls": 1})
    served.engine.open.clear()
    calls = [asyncio.create_task(served.ask([*ASKED, asked(word)])) for word in ("a", "b", "c")]
    await served.engine.until(1)
    await served.door.close()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [end.status_code for end in ends] == [410] * 3
    assert len(served.engine.requests) == 1


async def test_a_call_has_its_place_before_its_body_is_read(serve):
    served = await serve("six", agent={"max_calls": 1})
    headers, body = {"x-api-key": served.key}, json.dumps({"messages": ASKED}).encode()
    more, gone, place = asyncio.Event(), [], served.door.place

    def placed(client_left):
        gone.append(client_left)
        return place(client_left)

    served.door.place = placed

    async def slow():
        yield body[:5]
        await more.wait()
        yield body[5:]

    async with aiohttp.ClientSession(headers=headers) as client:
        first = asyncio.create_task(client.post(f"{served.url}/v1/chat/completions", data=slow()))
        await asyncio.wait_for(served.door.busy.wait(), 10)
        counted = asyncio.create_task(client.post(f"{served.url}/v1/messages/count_tokens", data=body))
        await until(lambda: len(gone) == 2)
        left = asyncio.create_task(client.post(f"{served.url}/v1/chat/completions", data=body))
        await until(lambda: len(gone) == 3)
        left.cancel()
        await until(gone[2])
        assert not counted.done()
        more.set()
        async with await first as response, await counted as later:
            assert (await response.json())["choices"][0]["message"]["content"] == "six"
            assert later.status == 200
    await until(served.door.idle.is_set)
    assert len(served.engine.requests) == 1  # of the client that left, nothing is read


async def test_a_call_far_above_the_context_is_never_tokenized(serve):
    served = await serve("six")
    long = [asked("zebra " * 20_000)]
    url, headers = f"{served.url}/v1/messages/count_tokens", {"x-api-key": served.key}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(url, json={"messages": long}) as response,
    ):
        assert response.status == 400
    with pytest.raises(openai.BadRequestError, match=r"a call of \d+ bytes leaves no room") as caught:
        await served.ask(long)
    assert caught.value.code == "context_length_exceeded"


async def test_an_agent_that_compacts_goes_on_after_the_context_is_full(serve):
    served = await serve("one", "two", "three", max_turns=9)
    first = (await served.ask()).choices[0].message
    other = asyncio.create_task(served.ask([asked("another branch")]))
    long = [*ASKED, first, asked("zebra " * 600)]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as caught:
        await served.ask(long)
    assert (caught.value.code, caught.value.status_code) == ("context_length_exceeded", 400)
    _, refused = await post(served, {"messages": [asked("zebra " * 600)], "max_tokens": 9}, "messages")
    assert refused["error"]["type"] == "invalid_request_error"
    assert refused["error"]["message"].startswith("prompt is too long: ")
    assert (await other).choices[0].message.content
    assert (await served.ask([asked("in short")])).choices[0].message.content
    assert not served.door.over.is_set()
    assert len((await served.said())[0]) == 3
    assert served.session.sample().stop == "completed"


async def test_an_agent_that_does_not_go_on_after_the_context_was_full_has_ended_so(serve):
    served = await serve("one")
    await served.ask()
    with pytest.raises(openai.BadRequestError):
        await served.ask([*ASKED, asked("zebra " * 600)])
    await served.said()
    assert served.session.sample().stop == "context_overflow"


async def test_models(serve):
    served = await serve()
    assert [model.id async for model in await served.client.models.list()] == ["policy"]
    assert (await served.client.models.retrieve("org/any")).id == "org/any"


async def test_counting_tokens_is_no_turn(serve):
    served = await serve("six")
    headers, url = {"x-api-key": served.key}, f"{served.url}/v1/messages/count_tokens"
    async with aiohttp.ClientSession(headers=headers) as client:
        async with client.post(url, json={"messages": ASKED}) as response:
            counted = (await response.json())["input_tokens"]
        async with client.post(url, json={"messages": IMAGE}) as response:
            assert (response.status, (await response.json())["type"]) == (400, "error")
    assert (await served.ask()).usage.prompt_tokens == counted
    assert await served.said() == (["six"], [])


# --- repeats ----------------------------------------------------------------------------------------------------------


async def test_an_sdk_that_lost_the_answer_gets_the_same_turn(serve):
    served = await serve("six")
    served.engine.open.clear()
    tries, ask = asyncio.Semaphore(0), served.door.ask

    def counted(*given):
        tries.release()
        return ask(*given)

    served.door.ask = counted
    async with served.made(max_retries=3, timeout=1) as client:
        answer = asyncio.create_task(served.ask(client=client))
        for _ in range(2):  # the first try times out, the second joins the same turn
            await asyncio.wait_for(tries.acquire(), 20)
        served.engine.open.set()
        first = (await answer).streamrl
    again = await served.ask(extra_headers={"x-stainless-retry-count": "1"})  # it came, and was lost on the way
    assert again.streamrl == first
    assert len(served.engine.requests) == 1
    assert await served.said() == (["six"], [])


async def test_an_idempotency_key_makes_a_call_a_repeat(serve):
    served = await serve("six", "seven")
    said = [await served.ask(extra_headers={"Idempotency-Key": key}) for key in ("a", "b", "a")]
    assert [one.choices[0].message.content for one in said] == ["six", "seven", "six"]


async def test_the_answer_that_nobody_waited_for_goes_to_who_asks_again(serve):
    served = await serve("six")
    served.engine.open.clear()
    left = asyncio.create_task(served.ask(max_tokens=5))
    await served.engine.until(1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    again = asyncio.create_task(served.ask(max_tokens=5))
    served.engine.open.set()
    assert (await again).choices[0].message.content == "six"
    assert len(served.engine.requests) == 1


async def test_equal_calls_at_the_same_time_are_turns_of_their_own_for_raw_clients_too(serve):
    words = [str(number) for number in range(8)]
    served = await serve(*words)
    served.engine.open.clear()
    calls = [asyncio.create_task(post(served, {"messages": ASKED})) for _ in words]
    await served.engine.until(8)
    served.engine.open.set()
    said = [(await one)[1]["choices"][0]["message"]["content"] for one in calls]
    assert sorted(said) == words
    assert sorted((await served.said())[0]) == words


async def test_each_of_two_equal_calls_that_were_lost_has_a_repeat_of_its_own(serve):
    served = await serve("six", "seven")
    served.engine.open.clear()
    lost = [asyncio.create_task(served.ask()) for _ in range(2)]
    await served.engine.until(2)
    for one in lost:
        one.cancel()
    await asyncio.gather(*lost, return_exceptions=True)
    header = {"x-stainless-retry-count": "1"}
    again = [asyncio.create_task(served.ask(extra_headers=header)) for _ in lost]
    served.engine.open.set()
    assert sorted([(await one).choices[0].message.content for one in again]) == ["seven", "six"]
    assert len(served.engine.requests) == 2


async def test_an_agent_may_sample_twice_from_one_conversation_and_keep_both(serve):
    served = await serve("six", "seven", "more of six", "more of seven")
    both = await asyncio.gather(served.ask(), served.ask())  # the SDK numbers its tries: these are no repeats
    said = sorted(one.choices[0].message.content for one in both)
    assert said == ["seven", "six"]
    for one in both:
        await served.ask([*ASKED, one.choices[0].message, asked("more")])
    assert len([turn for turn in served.session.sample().turns if turn.sampled]) == 4


# --- what is no part of the record ------------------------------------------------------------------------------------


async def test_what_planner_executor_and_critic_said_is_kept_and_titles_that_say_so_are_not(serve):
    """Only the executor has tools, and the planner samples two plans."""
    served = await serve("plan A", "plan B", CALLED, "grass", "good", "a title")
    plan = [{"role": "system", "content": "you plan"}, asked()]
    plans = [await served.ask(plan) for _ in range(2)]
    message = (await served.ask(tools=[LOOK_UP])).choices[0].message
    await served.ask([*ASKED, message, answered("x", message.tool_calls[0].id)], tools=[LOOK_UP])
    await served.ask([{"role": "system", "content": "you criticise"}, asked("grass")])
    await served.ask([asked("write a title")], extra_headers={"X-Streamrl-Auxiliary": "1"})
    assert (await served.said())[0] == ["plan A", "plan B", CALLED, "grass", "good"]
    sample = served.session.sample()
    assert (sample.dropped, sample.auxiliary, len(plans)) == (0, 1, 2)


async def test_a_reply_that_nobody_got_is_dropped_and_counted(serve):
    served = await serve("lost", "six")
    served.engine.open.clear()
    left = asyncio.create_task(served.ask([asked("hurry")]))
    await served.engine.until(1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    served.engine.open.set()
    await served.ask()
    assert (await served.said())[0] == ["six"]
    assert (served.session.sample().dropped, served.session.sample().auxiliary) == (1, 0)


async def test_a_stream_that_its_client_has_left_is_dropped(serve, monkeypatch):
    monkeypatch.setattr(server, "_PING_SECONDS", 0.02)
    served = await serve("lost", "six")
    served.engine.open.clear()
    stream = await served.ask([asked("hurry")], stream=True)
    await stream.close()
    await until(lambda: all(pending.left for pending in served.door._calls))
    served.engine.open.set()
    await served.ask()
    assert (await served.said())[0] == ["six"]


async def test_auxiliary_calls_are_not_recorded_unless_rewarded(serve):
    served = await serve("a title", "main", "liked", "end")
    marked = {"X-Streamrl-Auxiliary": "1"}
    await served.ask([asked("a title?")], extra_headers=marked)
    main = (await served.ask()).choices[0].message
    liked = await served.ask([asked("a summary?")], extra_headers=marked)
    await reward(served, 0.5, turn=liked.streamrl["turn"])
    await served.ask([*ASKED, main, asked("more")], extra_headers={"X-Streamrl-Auxiliary": "0"})
    assert (await served.said())[0] == ["main", "liked", "end"]
    sample = served.session.sample()
    assert [turn.reward for turn in sample.turns if turn.sampled] == [None, 0.5, None]
    assert (sample.dropped, sample.auxiliary) == (0, 1)


async def test_without_tools_anywhere_every_conversation_counts(serve):
    served = await serve("one", "two")
    await served.ask()
    await served.ask([asked("something else")])
    assert len([turn for turn in served.session.sample().turns if turn.sampled]) == 2


async def test_an_edited_history_forks_and_is_counted(serve):
    served = await serve("six", "seven")
    await served.ask()
    await served.ask([*ASKED, {"role": "assistant", "content": "five"}, asked("sure?")])
    assert served.session.forks == 1
    sampled, (edited,) = await served.said()
    assert sampled == ["six", "seven"]
    assert "five" in edited
    assert [turn.parent for turn in served.session.sample().turns] == [PROMPT, PROMPT, 1]


# --- rewards ----------------------------------------------------------------------------------------------------------


async def reward(served, value, **more):
    headers = {"Authorization": f"Bearer {served.key}"}
    url, body = f"{served.url}/v1/streamrl/reward", {"reward": value, **more}
    async with aiohttp.ClientSession(headers=headers) as client, client.post(url, json=body) as response:
        return response.status


async def test_an_agent_rewards_turns_and_the_episode(serve):
    served = await serve("six")
    number = (await served.ask()).streamrl["turn"]
    assert await reward(served, 0.25, turn=number) == 200
    assert await reward(served, 0.75) == 200
    assert await reward(served, 1, turn=7) == 400
    assert await reward(served, None) == 400
    assert served.session.posted == 0.75
    assert [turn.reward for turn in served.session.sample().turns] == [0.25]
