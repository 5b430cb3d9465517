"""A prompt and its response in the form of the reward model: its own chat template and tokenizer.

The response was sampled with another tokenizer, so its text is encoded again. The `tokenizers` package reads the files,
because a reward worker has no torch. The ids are those of transformers' `apply_chat_template`, with one difference: a
special token spelled out in a message is encoded as text. Otherwise a response could end its own turn and praise itself
in the next one. Without a template, special tokens in the prompt are kept, and those in the response are text.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson

from streamrl.consumers.reward import RewardSample
from streamrl.consumers.transcript import transcript
from streamrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    import jinja2
    import tokenizers

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_OPEN: Final = "\ufdd0"
_CLOSE: Final = "\ufdd1"
# Unicode will never assign these two. They mark parts to encode as text; they are first removed from all texts.
_MARKS: Final = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}|[{_OPEN}{_CLOSE}]")
_INSTALL: Final = "pip install 'streamrl[reward-models]'"


class Renderer:
    """Text and token ids of samples for one reward model. Thread-safe; slow to construct.

    `name` is a directory or a name on the hub. `mode`: `chat` uses the template; `plain` joins prompt and response as
    the policy read them; None: chat if there is a template, else plain, for text prompts only. `template` replaces the
    model's own. `ConfigError`: a package or a file is missing, or cannot be used.
    """

    def __init__(
        self, name: str, *, mode: Literal["chat", "plain"] | None = None, template: Path | None = None
    ) -> None:
        try:
            import jinja2  # noqa: F401
            import tokenizers  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"the text of a reward model needs the package {error.name}", _INSTALL) from error
        folder = _folder(name)
        self._file = folder / _TOKENIZER
        if not self._file.is_file():
            raise ConfigError(
                f"{name} has no {_TOKENIZER}, which the text of the reward model is made with",
                "args.tokenizer names another directory or hub name; args.text: server leaves it to a vLLM server",
            )
        settings = _settings(folder / _SETTINGS)
        text = _own_template(folder, settings) if template is None else _read(template, "args.chat_template")
        if mode == "chat" and text is None:
            raise ConfigError(
                f"the tokenizer of {name} has no chat template",
                "args.chat_template names a file with one; args.text: plain gives it prompt and response as text",
            )
        self._name, self._mode = name, mode
        self._template = None if text is None or mode == "plain" else _compiled(text, name)
        self._special = _special_tokens(settings)
        self._backend = self._load()
        self._literal: tokenizers.Tokenizer | None = None
        tokens = [token.content for token in self._backend.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted(tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _load(self) -> tokenizers.Tokenizer:
        import tokenizers

        backend = tokenizers.Tokenizer.from_file(str(self._file))
        backend.no_truncation()
        backend.no_padding()
        return backend

    def ids(self, sample: RewardSample) -> list[int]:
        """Token ids of prompt and response; `DataError`: the messages do not fit the template, or there is none."""
        if self._template is None:
            return self._plain(sample)
        messages = [self._marked(message) for message in map(_with_objects, sample.messages)]
        pieces = self._pieces(self._rendered(self._template, messages))
        return [token for encoding in pieces for token in encoding.ids]

    def _plain(self, sample: RewardSample) -> list[int]:
        if self._mode is None and sample.prompt.messages:
            raise DataError(
                f"line {sample.prompt.line} of the data set has messages, and {self._name} has no chat template",
                "args.text: plain gives it what the policy read; args.chat_template names a file with a template",
            )
        prompt, response = _clean(sample.prompt.text), _clean(transcript(sample))

        def mark(found: re.Match[str]) -> str:
            return f"{_OPEN}{found[0]}{_CLOSE}" if found.end() > len(prompt) else found[0]

        encodings = self._pieces(self._control.sub(mark, prompt + response))
        whole = encodings[0] if len(encodings) == 1 else encodings[0].merge(encodings, growing_offsets=True)
        ids: list[int] = self._backend.post_process(whole, None, True).ids
        return ids

    def _rendered(self, template: jinja2.Template, messages: Sequence[Mapping[str, Any]]) -> str:
        import jinja2

        try:
            return template.render(
                **self._special, messages=messages, tools=None, documents=None, add_generation_prompt=False
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(f"the chat template of {self._name} refuses the messages: {error}") from error

    def _pieces(self, text: str) -> list[tokenizers.Encoding]:
        """Encodings of the parts of a text. Special tokens in marked parts are encoded as text."""
        encodings = []
        for number, piece in enumerate(_MARKS.split(text)):
            if piece or not number:
                backend = self._as_text() if number % 2 else self._backend
                encodings.append(backend.encode(piece, add_special_tokens=False))
        return encodings

    def _as_text(self) -> tokenizers.Tokenizer:
        """The tokenizer without special tokens, loaded at first use because few runs need it."""
        if self._literal is None:
            literal = self._load()
            literal.encode_special_tokens = True
            self._literal = literal
        return self._literal

    def _marked(self, value: Any) -> Any:
        """A message with its special tokens marked, and without None values."""
        if isinstance(value, str):
            return self._control.sub(f"{_OPEN}\\g<0>{_CLOSE}", _clean(value))
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(inner) for key, inner in value.items() if inner is not None}
        if isinstance(value, list | tuple):
            return [self._marked(inner) for inner in value]
        return value


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the arguments of its calls as objects, which templates write as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": _with_object(call["function"])} for call in message["tool_calls"]]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _with_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {**function, "arguments": orjson.loads(function["arguments"])}
    except (TypeError, KeyError, orjson.JSONDecodeError):
        return function


def _clean(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def check_template(path: Path) -> None:
    """`ConfigError` if the file cannot be read or is not a jinja template."""
    _compiled(_read(path, "args.chat_template"), str(path))


def _compiled(template: str, name: str) -> jinja2.Template:
    """Compile as transformers does: sandboxed, with the few names that templates use."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the text of the model; it has no effect here."""

        tags = {"generation"}  # noqa: RUF012 (as in the class of jinja)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        # jinja's own filter escapes HTML. Models were trained with the spaces of this library.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: dt.datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"the chat template of {name} cannot be used: {error}", "it must be a jinja template"
        ) from error


def _own_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    if (folder / _TEMPLATE).is_file():
        return _read(folder / _TEMPLATE, _TEMPLATE)
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use (`bos_token`). Files hold them as text or as mappings."""
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _folder(name: str) -> Path:
    if name and Path(name).is_dir():
        return Path(name)
    if Path(name).is_absolute() or not name:
        raise ConfigError(
            f"{name or 'the model'} is not a directory", "reward_models.NAME.model or args.tokenizer names it"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=[_TOKENIZER, _SETTINGS, _TEMPLATE]))
    except (OSError, HFValidationError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"no tokenizer of {name}: {reason}", "args.tokenizer names a directory or a hub name"
        ) from error


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from error
