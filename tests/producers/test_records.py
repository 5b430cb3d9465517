"""Records of every kind of source, by number; columns and templates; sources that cannot be read."""

import io
import json
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from streamrl.config import RunConfig, SourceConfig
from streamrl.errors import ConfigError, DataError
from streamrl.producers import dataset, records
from streamrl.producers.dataset import PromptLimits, examine_prompts
from streamrl.producers.records import open_records
from streamrl.producers.tokenizer import Tokenizer
from streamrl.runtime.preflight import check_data
from streamrl.wire import Prompt, decode
from tests.producers.data_kit import LIMITS, TOKENIZER, numbered, open_training, prompts, texts, write
from tests.producers.test_dataset import TEMPLATE, make_backend


def opened(source, most=None):
    return open_records(SourceConfig(source=source), [], most)


LINES = st.lists(st.sampled_from([b"", b"  ", b"\r", b'{"prompt":"a"}', b' {"a": 1}', b"x", b'{"prompt":"longer"}\r']))


@settings(deadline=None)
@given(lines=LINES, end=st.booleans(), block=st.integers(1, 40), most=st.integers(1, 9))
def test_lines_are_those_of_python_whatever_the_blocks(tmp_path_factory, lines, end, block, most):
    path = tmp_path_factory.mktemp("d") / "p.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * end)
    whole = [(n, raw) for n, raw in enumerate(io.BytesIO(path.read_bytes())) if raw.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK", block)
        if not whole:
            with pytest.raises(DataError, match=r"p\.jsonl is empty"):
                opened(path)
            return
        found = opened(path)
        assert found.size == len(whole)
        assert found.read(range(found.size)) == whole
        assert found.read([found.size - 1, 0]) == [whole[-1], whole[0]]
        assert found.first(most) == whole[:most]
        few = records.JsonLines(path, most)
        assert few.first(most) == whole[: few.size][:most]


def test_the_first_lines_of_a_file_are_found_without_reading_it(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BLOCK", 1000)
    found = opened(numbered(tmp_path / "p.jsonl", 5000), most=100)
    assert 100 <= found.size < 200
    assert [orjson.loads(raw)["answer"] for _, raw in found.first(100)] == list(range(100))


def write_parquet(path, *rows):
    parquet.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)
    return path


def test_parquet_is_read_by_row(tmp_path):
    rows = [{"prompt": f"p{n}", "answer": {"any": [n]}, "level": None if n else 1} for n in range(7)]
    path = write_parquet(tmp_path / "p.parquet", *rows)
    assert opened(path).read([6, 0, 3]) == [(6, rows[6]), (0, rows[0]), (3, rows[3])]
    assert opened(path).read(range(2, 5)) == [(n, rows[n]) for n in (2, 3, 4)]
    data = open_training(path)
    jsonl = open_training(write(tmp_path / "p.jsonl", *rows))
    assert texts(data, range(9)) == texts(jsonl, range(9))
    [prompt] = prompts(data, [4])
    assert (prompt.answer, prompt.metadata["level"]) == ({"any": [prompt.line]}, None if prompt.line else 1)
    other = write_parquet(tmp_path / "q.parquet", *rows[:6], {**rows[6], "answer": {"any": [0]}})
    assert open_training(other).fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"", "cannot read the prompts"), (b"no parquet", "cannot read the prompts")],
)
def test_a_file_that_is_no_parquet(tmp_path, content, why):
    path = tmp_path / "p.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=why):
        opened(path)
    with pytest.raises(DataError, match=r"e\.parquet is empty"):
        opened(write_parquet(tmp_path / "e.parquet", {"prompt": "a"}).parent / empty(tmp_path))


def empty(folder):
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "e.parquet")
    return "e.parquet"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The cache as `datasets` leaves it after openai/gsm8k (config main, split train) was loaded; no network."""
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"question": f"q{n}", "answer": str(n)} for n in range(5)]
    made = datasets.load_dataset("json", data_files=str(write(tmp_path / "train.jsonl", *rows)), split="train")
    source = Path(made.cache_files[0]["filename"]).parent
    target = tmp_path / "cache" / "openai___gsm8k" / "main" / source.parent.name / source.name
    shutil.copytree(source, target)
    (target / "json-train.arrow").rename(target / "gsm8k-train.arrow")
    info = json.loads((target / "dataset_info.json").read_text()) | {"config_name": "main", "dataset_name": "gsm8k"}
    (target / "dataset_info.json").write_text(json.dumps(info))
    return rows


def test_a_data_set_of_the_hub_is_read_from_the_cache_without_network(hub_cache, tmp_path):
    place = "hf:openai/gsm8k:main/train"
    assert opened(place).read([3, 0]) == [(3, hub_cache[3]), (0, hub_cache[0])]
    data = open_training(place, columns={"prompt": "question"})
    jsonl = open_training(write(tmp_path / "p.jsonl", *hub_cache), columns={"prompt": "question"})
    assert texts(data, range(12)) == texts(jsonl, range(12))
    assert open_training(place, columns={"prompt": "question"}).fingerprint == data.fingerprint
    named = open_training([place, numbered(tmp_path / "q.jsonl", 2)], prompt="{answer}?")
    assert {prompt.source for prompt in prompts(named, range(7))} == {"gsm8k", "q"}
    with pytest.raises(DataError, match=r"hf:openai/gsm8k:main/train:1: needs either .* \(also 2, 3, 4, 5\)") as caught:
        open_training(place)
    assert "its columns are question, answer" in caught.value.hint


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("hf:openai/none:train", "Couldn't reach 'openai/none' on the Hub|offline mode is enabled"),
        ("hf:openai/gsm8k:other/train", r"config 'other'.*\['main'\]"),
        ("hf:openai/gsm8k:main/tset", r"Unknown split \"tset\".*train"),
    ],
)
def test_a_data_set_that_cannot_be_loaded_says_why(hub_cache, place, why):
    with pytest.raises(DataError, match=why) as caught:
        opened(place)
    assert caught.value.message.startswith(f"{place} cannot be loaded")
    assert "HF_HOME" in caught.value.hint


@pytest.mark.parametrize(
    ("place", "package"), [("hf:openai/gsm8k:main/train", "datasets"), (Path("p.parquet"), "pyarrow")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch, place, package):
    monkeypatch.setattr("streamrl.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"needs {package}") as caught:
        opened(place)
    assert f"streamrl[{'parquet' if package == 'pyarrow' else package}]" in caught.value.hint


def one(folder, record, **data):
    [prompt] = prompts(open_training(write(folder / "p.jsonl", record), **data), [0])
    return prompt


def test_columns_and_a_template_make_the_prompt(tmp_path):
    record = {"question": "1+1", "solution": "2", "data_source": "sums", "level": 3}
    prompt = one(tmp_path, record, columns={"prompt": "question", "answer": "solution", "source": "data_source"})
    assert (prompt.text, prompt.answer, prompt.source) == ("1+1", "2", "sums")
    assert prompt.metadata == {"data_source": "sums", "level": 3}
    prompt = one(tmp_path, record, prompt="{question}={{}} {level:02}\n", columns={"answer": "solution"})
    assert (prompt.text, prompt.answer) == ("1+1={} 03\n", "2")
    assert prompt.metadata == {"question": "1+1", "data_source": "sums", "level": 3}
    assert one(tmp_path, {"prompt": "a", "source": "web"}).source == "", "only a column that is named is a source"


def test_each_source_may_have_its_own_columns_and_template(tmp_path):
    a, b = write(tmp_path / "a.jsonl", {"q": "1"}), write(tmp_path / "b.jsonl", {"prompt": "2"})
    data = open_training(
        [{"source": a, "columns": {"prompt": "q"}}, {"source": b, "columns": {}, "prompt": "{prompt}!"}]
    )
    assert sorted(texts(data, [0, 1])) == ["1", "2!"]


def test_a_prompt_of_text_may_be_a_chat(tmp_path):
    tokenizer = Tokenizer(make_backend(TEMPLATE), "chat")
    path = write(tmp_path / "p.jsonl", {"question": "1+1"})
    config = RunConfig.model_validate({"data": {"train": path, "prompt": "{question}=", "chat": True}})
    data = dataset.load_prompts(config.data.whole(config.data.train), tokenizer, PromptLimits(50, 60))
    prompt = decode(data.prompts[0], Prompt)
    assert (prompt.text, prompt.messages) == ("[user]1+1=[assistant]", [{"role": "user", "content": "1+1="}])


@pytest.mark.parametrize(
    ("record", "data", "why"),
    [
        ({"a": 1}, {"columns": {"prompt": "question"}}, "no column `question`, which columns.prompt names"),
        ({"a": 1}, {"prompt": "{question}"}, "the template of the prompt finds no 'question'"),
        ({"a": 1}, {"prompt": "{a.b}"}, "no attribute 'b'"),
        ({"a": 1}, {"prompt": "{a"}, "expected '}'"),
        ({"a": 1}, {"prompt": "{}"}, "positional"),
        ({"prompt": "p", "s": 1}, {"columns": {"source": "s"}}, "`source` must be text"),
        ({"prompt": "p", "question": 5}, {"columns": {"prompt": "question"}}, "`prompt` must be text"),
    ],
)
def test_columns_that_do_not_fit_are_named_with_the_line(tmp_path, record, data, why):
    path = write(tmp_path / "p.jsonl", {"prompt": "p", "question": "q", "s": "s"}, record)
    with pytest.raises(DataError) as caught:
        open_training(path, **data)
    assert why in caught.value.message
    assert ":2: " in caught.value.message or "p.jsonl:1: " in caught.value.message


def test_a_column_of_mixed_types_is_refused_as_a_prompt_and_kept_as_an_answer(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"prompt": "p", "answer": answer} for answer in (1, "1", [1], None)))
    data = open_training(path, shuffle=False)
    assert [prompt.answer for prompt in prompts(data, range(4))] == [1, "1", [1], None]
    mixed = write(tmp_path / "q.jsonl", *({"prompt": prompt} for prompt in ("1", 1, 1.5, "2")))
    with pytest.raises(DataError, match=r"q\.jsonl:2: `prompt` must be text and not empty \(also 3\)"):
        open_training(mixed)


def test_held_out_prompts_of_several_sources_are_spread_evenly(tmp_path):
    sources = [
        SourceConfig(source=numbered(tmp_path / f"{letter}.jsonl", count, letter))
        for letter, count in (("a", 6), ("b", 2))
    ]
    data = dataset.load_prompts(sources, TOKENIZER, LIMITS)
    assert "".join(decode(prompt, Prompt).text[0] for prompt in data.prompts) == "aabaaaba"


def test_held_out_prompts_without_end_are_refused(tmp_path, monkeypatch):
    (tmp_path / "endless_data.py").write_text(
        "import itertools\ndef f(): return ({'prompt': 'p'} for _ in itertools.count())"
    )
    monkeypatch.setattr(dataset, "_IN_MEMORY", 1000)
    with pytest.raises(DataError, match="endless_data:f has more than 1000 prompts"):
        dataset.load_prompts([SourceConfig(source="endless_data:f")], TOKENIZER, LIMITS, [tmp_path])


def test_the_preflight_looks_at_every_source(tmp_path):
    good, bad = numbered(tmp_path / "good.jsonl", 2), write(tmp_path / "bad.jsonl", {"prompt": "p"}, {"answer": 1})
    config = RunConfig.model_validate({"data": {"train": good, "held_out": [good, bad]}})
    with pytest.raises(DataError, match=r"bad\.jsonl:2: needs either"):
        check_data(config)
    (tmp_path / "stream_data.py").write_text("def f(): return iter([{'prompt': 'p'}])")
    top = {"plugin_paths": [tmp_path]}
    found = check_data(
        RunConfig.model_validate({"data": {"train": [good, {"source": "stream_data:f", "weight": 1}][1:]}, **top})
    )
    assert found == "stream_data:f"
    with pytest.raises(ConfigError, match="stream_data:f is an iterable"):
        check_data(RunConfig.model_validate({"data": {"train": "stream_data:f", "epochs": 1}, **top}))
    assert examine_prompts(SourceConfig(source=good), opened(good), lambda: TOKENIZER, LIMITS, count=9) == 0
