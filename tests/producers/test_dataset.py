"""Which prompt a group has is a pure function; a line that cannot be used is named with its file and number."""

import orjson
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from streamrl.config import ModelConfig, SourceConfig
from streamrl.errors import ConfigError, DataError
from streamrl.producers import dataset
from streamrl.producers.dataset import PromptLimits
from streamrl.producers.order import fingerprint_of
from streamrl.producers.records import open_records
from streamrl.producers.tokenizer import Tokenizer
from streamrl.wire import Prompt, decode

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LIMITS = PromptLimits(max_prompt_tokens=20, context=24)


def make_backend(template=None):
    """One token per character of ASCII, `<s>` at the start of plain text."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, **{chr(code): code for code in range(32, 127)}, "\n": 10}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(make_backend(), "tiny")


@pytest.fixture(scope="module")
def chat_tokenizer():
    return Tokenizer(make_backend(TEMPLATE), "tiny-chat")


def load_prompts(path, *arguments, **options):
    return dataset.load_prompts([SourceConfig(source=path)], *arguments, **options)


def examine_prompts(path, tokenizer, limits, count):
    source = SourceConfig(source=path)
    return dataset.examine_prompts(source, open_records(source, [], count), tokenizer, limits, count=count)


def write(path, *records):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else orjson.dumps(line)) + b"\n" for line in records))
    return path


def characters(text):
    return [ord(character) for character in text]


def test_text_prompts_carry_answer_metadata_line_and_ids(tmp_path, tokenizer):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "12=", "answer": "3", "level": 2, "tags": ["a"]},
        b"",
        {"prompt": "4", "answer": {"any": [1]}},
    )
    data = load_prompts(path, tokenizer, LIMITS)
    first, second = (decode(prompt, Prompt) for prompt in data.prompts)
    assert first.token_ids.tolist() == [0, *characters("12=")]
    assert (first.text, first.answer, first.metadata, first.line) == ("12=", "3", {"level": 2, "tags": ["a"]}, 0)
    assert (second.answer, second.line, second.evaluation) == ({"any": [1]}, 2, False)
    [held_out] = load_prompts(write(tmp_path / "h.jsonl", {"prompt": "5"}), tokenizer, LIMITS, evaluation=True).prompts
    assert decode(held_out, Prompt).evaluation


def test_chat_prompts_go_through_the_template_once(tmp_path, chat_tokenizer):
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "b"}]
    path = write(tmp_path / "p.jsonl", {"messages": messages, "answer": 1}, {"prompt": "x"})
    chat, text = (
        decode(prompt, Prompt) for prompt in load_prompts(path, chat_tokenizer, PromptLimits(99, 100)).prompts
    )
    assert chat.text == "[system]A[user]b[assistant]"
    assert chat.token_ids.tolist() == characters(chat.text)  # the template alone says what is special
    assert chat.messages == messages
    assert text.token_ids.tolist() == [0, ord("x")]


def test_chats_are_encoded_together_without_those_that_are_refused(tmp_path, chat_tokenizer, monkeypatch):
    sizes, encode = [], Tokenizer.encode

    def noted(self, texts, *, special):
        sizes.append(len(texts))
        return encode(self, texts, special=special)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    chats = [{"messages": [{"role": "user", "content": text}]} for text in "abc"]
    path = write(tmp_path / "p.jsonl", *chats[:2], {"prompt": "x"}, chats[2])
    data = load_prompts(path, chat_tokenizer, PromptLimits(99, 100))
    assert [decode(prompt, Prompt).text[:7] for prompt in data.prompts] == ["[user]a", "[user]b", "x", "[user]c"]
    assert sizes == [1, 3]
    with pytest.raises(DataError, match=r":2: .*no robots"):
        load_prompts(
            write(path, chats[0], {"messages": [{"role": "robot", "content": "a"}]}),
            chat_tokenizer,
            PromptLimits(99, 100),
        )
    assert sizes == [1, 3, 0, 1]


def test_decoding_leaves_out_special_tokens_only(tokenizer):
    assert Tokenizer.decode(tokenizer, [0, *characters("ab"), 1]).replace(" ", "") == "ab"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"{not json", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "not a JSON object"),
        ({"answer": "3"}, "`prompt` (text) or `messages`"),
        ({"prompt": "a", "messages": []}, "`prompt` (text) or `messages`"),
        ({"prompt": 7}, "must be text"),
        ({"prompt": ""}, "must be text"),
        ({"messages": []}, "list of objects"),
        ({"messages": [{"content": "a"}]}, "list of objects"),
        ({"messages": ["a"]}, "list of objects"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no chat template"),
        ({"prompt": "a" * 20}, "21 tokens, data.max_prompt_tokens is 20"),
        ({"prompt": "a", "big": 2**64 - 1, "text": "x" * (17 << 20)}, None),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer, bad, words):
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, bad)
    if words is None:
        assert len(load_prompts(path, tokenizer, LIMITS)) == 2
        return
    with pytest.raises(DataError) as caught:
        load_prompts(path, tokenizer, LIMITS)
    assert words in str(caught.value)
    assert caught.value.message.startswith(f"{path}:2: ")
    assert caught.value.exit_code == 78


def test_a_bad_line_is_named_in_a_later_chunk_too(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", *[{"prompt": "a"}] * 1500, {"prompt": "a" * 30})
    with pytest.raises(DataError, match=r":1501: "):
        load_prompts(path, tokenizer, LIMITS)


def test_all_bad_lines_are_named_by_kind(tmp_path, chat_tokenizer):
    robot = {"messages": [{"role": "robot", "content": "a"}]}
    bad = [
        b"{",
        {"prompt": "a" * 20},
        {"answer": "4"},
        *[b"[" for _ in range(7)],
        robot,
        {"prompt": "b" * 19 + "c" * 5},
    ]
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, *bad)
    with pytest.raises(DataError) as caught:
        load_prompts(path, chat_tokenizer, LIMITS)
    parts = caught.value.message.split("; ")
    assert parts[0].startswith(f"{path}:2: no JSON: ")
    assert parts[0].endswith("(also 5, 6, 7, 8, 9 and 2 more)")
    assert parts[1] == f"{path}:3: the prompt has 21 tokens, data.max_prompt_tokens is 20, model.context 24 (also 13)"
    assert parts[2] == f"{path}:4: needs either `prompt` (text) or `messages` (chat)"
    assert parts[3].startswith(f"{path}:12: the chat template of tiny-chat refuses the messages")
    assert len(parts) == 4
    assert "long_prompts: drop" in caught.value.hint


def test_long_prompts_are_left_out_and_counted_if_the_run_says_so(tmp_path, tokenizer):
    drop = PromptLimits(20, 24, drop=True)
    path = write(tmp_path / "p.jsonl", {"prompt": "a" * 30}, {"prompt": "a"}, {"prompt": "b" * 20}, {"prompt": "c"})
    data = load_prompts(path, tokenizer, drop)
    assert ([decode(prompt, Prompt).text for prompt in data.prompts], data.dropped) == (["a", "c"], 2)
    more = load_prompts(path, tokenizer, PromptLimits(21, 24, drop=True))
    assert (len(more), more.dropped) == (3, 1)
    assert more.fingerprint != data.fingerprint
    fits = write(tmp_path / "q.jsonl", {"prompt": "a"}, {"prompt": "c"})
    assert load_prompts(fits, tokenizer, drop).fingerprint == load_prompts(fits, tokenizer, LIMITS).fingerprint
    with pytest.raises(DataError, match="no prompts that are short enough"):
        load_prompts(write(tmp_path / "r.jsonl", {"prompt": "a" * 30}), tokenizer, drop)


def test_the_first_lines_are_examined_without_a_tokenizer_if_they_are_short_texts(tmp_path, tokenizer):
    limits = PromptLimits(20, 24)

    def none():
        raise AssertionError("it takes seconds")

    path = write(tmp_path / "p.jsonl", *[{"prompt": "a" * 12}] * 3, {"prompt": "a" * 13}, {"prompt": "a" * 20}, b"{")
    assert examine_prompts(path, none, limits, 3) == 0
    assert examine_prompts(path, lambda: tokenizer, limits, 4) == 0
    with pytest.raises(DataError, match=r":5: the prompt has 21 tokens"):
        examine_prompts(path, lambda: tokenizer, limits, 5)
    assert examine_prompts(path, lambda: tokenizer, PromptLimits(20, 24, drop=True), 5) == 1
    with pytest.raises(DataError, match=r":6: no JSON"):
        examine_prompts(path, none, limits, 6)
    with pytest.raises(DataError, match="is empty"):
        examine_prompts(write(tmp_path / "e.jsonl", b""), none, limits, 6)


def test_a_prompt_as_long_as_the_context_and_a_chat_the_template_refuses(tmp_path, chat_tokenizer):
    path = write(tmp_path / "p.jsonl", {"prompt": "a" * 23})
    with pytest.raises(DataError, match=r":1: .*tokens, .* model.context 24"):
        load_prompts(path, chat_tokenizer, PromptLimits(30, 24))
    path = write(tmp_path / "q.jsonl", {"messages": [{"role": "robot", "content": "a"}]})
    with pytest.raises(DataError, match=r":1: .*no robots"):
        load_prompts(path, chat_tokenizer, LIMITS)


def test_no_file_and_no_prompts(tmp_path, tokenizer):
    with pytest.raises(DataError, match="No such file"):
        load_prompts(tmp_path / "none.jsonl", tokenizer, LIMITS)
    with pytest.raises(DataError, match="Is a directory"):
        load_prompts(tmp_path, tokenizer, LIMITS)
    with pytest.raises(DataError, match="is empty"):
        load_prompts(write(tmp_path / "empty.jsonl", b"", b"  "), tokenizer, LIMITS)


def test_no_tokenizer_is_a_configuration_error(tmp_path):
    for name in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError) as caught:
            Tokenizer.load(ModelConfig(path=str(name)))
        assert str(name) in caught.value.message
        assert caught.value.exit_code == 78


def test_a_saved_tokenizer_loads_and_encodes_alike(tmp_path, chat_tokenizer):
    make_backend(TEMPLATE).save_pretrained(tmp_path)
    loaded = Tokenizer.load(ModelConfig(path="elsewhere", tokenizer=str(tmp_path)))
    for texts in ([], ["a"], ["12=", "b c"]):
        assert [ids.tolist() for ids in loaded.encode(texts, special=True)] == [
            ids.tolist() for ids in chat_tokenizer.encode(texts, special=True)
        ]


def test_the_fingerprint_changes_with_everything_a_prompt_depends_on(tmp_path, tokenizer, chat_tokenizer):
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"})
    base = load_prompts(path, tokenizer, LIMITS)
    assert base.fingerprint == load_prompts(path, chat_tokenizer, LIMITS).fingerprint  # the same ids come of it
    prints = [fingerprint_of(base, seed=seed, shuffle=shuffle) for seed in (0, 1) for shuffle in (True, False)]
    write(path, {"prompt": "b"}, {"prompt": "a"})
    prints.append(fingerprint_of(load_prompts(path, tokenizer, LIMITS), seed=0, shuffle=True))
    write(path, {"prompt": "a"}, {"prompt": "b"})
    bare = make_backend()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    prints.append(fingerprint_of(load_prompts(path, Tokenizer(bare, "bare"), LIMITS), seed=0, shuffle=True))
    assert len(set(prints)) == 6
    assert fingerprint_of(load_prompts(path, tokenizer, LIMITS), seed=0, shuffle=True) == prints[0]


def test_a_prompt_that_is_a_list_of_messages_is_read_as_verl_reads_it(tmp_path, chat_tokenizer):
    messages = [{"role": "user", "content": "2+2="}]
    verl = {
        "data_source": "gsm8k",
        "prompt": messages,
        "reward_model": {"ground_truth": "4"},
        "extra_info": {"index": 1},
    }
    data = load_prompts(write(tmp_path / "p.jsonl", verl), chat_tokenizer, PromptLimits(60, 64))
    ours = load_prompts(write(tmp_path / "q.jsonl", {"messages": messages}), chat_tokenizer, PromptLimits(60, 64))
    prompt, other = decode(data.prompts[0], Prompt), decode(ours.prompts[0], Prompt)
    assert (prompt.messages, prompt.tokens, prompt.text) == (messages, other.tokens, other.text)
    assert prompt.metadata == {name: value for name, value in verl.items() if name != "prompt"}
    with pytest.raises(DataError, match=r"p\.jsonl:1: `messages` \(or a `prompt` that is a list\) must be"):
        load_prompts(write(tmp_path / "p.jsonl", {"prompt": ["2+2="]}), chat_tokenizer, LIMITS)
