"""How models write calls of tools in their text. Text that only looks a little like a call is content."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from streamrl.errors import ConfigError
from streamrl.producers.episodes.messages import json_object
from streamrl.producers.episodes.rendering import ToolCall, ToolSchema


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call as read: `arguments` is None when it is malformed; its text is kept, so that a tool error answers it."""

    raw: str
    name: str = ""
    arguments: dict[str, Any] | None = None


Reading: TypeAlias = tuple[str, list[WrittenCall]]
"""The text without its calls, and the calls."""
ToolFormat: TypeAlias = Callable[[str, Sequence[ToolSchema]], Reading]

_BLOCK: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*\Z", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_PYTHON_TAG: Final = "<|python_tag|>"
_PYTHONIC: Final = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_WORDS: Final = {"true": True, "false": False, "null": None}


def _hermes(text: str, _tools: Sequence[ToolSchema]) -> Reading:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, of Hermes, Qwen2.5, Qwen3 and many others."""
    return _blocks(text, lambda body: _named(json_object(body), ("arguments",)))


def _qwen_xml(text: str, tools: Sequence[ToolSchema]) -> Reading:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, of Qwen3-Coder."""
    return _blocks(text, lambda body: _tagged(body, tools))


def _llama_json(text: str, _tools: Sequence[ToolSchema]) -> Reading:
    """`{"name": …, "parameters": {…}}` and nothing else, several with `;` between them, of Llama 3."""
    body = text.strip()
    tagged = body.startswith(_PYTHON_TAG)
    rest = body.removeprefix(_PYTHON_TAG)
    if not (tagged or body.startswith("{")):
        return text, []
    calls: list[WrittenCall] = []
    while rest := rest.lstrip(" \n;,"):
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            end = len(rest)
        raw, rest = rest[:end], rest[end:]
        name, arguments = _named(json_object(raw), ("parameters", "arguments"))
        # An answer may be JSON as well.
        if arguments is None and not tagged and not re.match(r'\{\s*"name"\s*:\s*"', raw):
            return text, []
        calls.append(WrittenCall(raw, name, arguments))
    return "", calls


def _pythonic(text: str, _tools: Sequence[ToolSchema]) -> Reading:
    """`[name(key=value), …]` and nothing else, of Llama 4 and others; values are JSON's or Python's."""
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not _PYTHONIC.match(body):
        return text, []
    try:
        parsed = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", [WrittenCall(body)]
    if not isinstance(parsed, ast.List):
        return text, []
    return "", [_python_call(body, node) for node in parsed.elts]


FORMATS: Final[dict[str, ToolFormat]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "llama_json": _llama_json,
    "pythonic": _pythonic,
}


def format_of(name: str, template: str) -> ToolFormat:
    """The format of that name; `auto` looks at the chat template and takes `hermes` when it says nothing."""
    if name == "auto":
        llama = _PYTHON_TAG in template or '"parameters": dictionary' in template
        name = "llama_json" if llama and "<tool_call>" not in template else "hermes"
        name = "qwen_xml" if "<function=" in template else name
    if name not in FORMATS:
        raise ConfigError(f"there is no tool format {name!r}", f"take auto, {', '.join(FORMATS)}")
    return FORMATS[name]


def name_calls(written: Sequence[WrittenCall], ids: Sequence[int], prompt: Sequence[int]) -> tuple[ToolCall, ...]:
    """Each call has the same id each time that the same turn is read."""
    turn = hashlib.blake2b(f"{list(prompt)}{list(ids)}".encode(), digest_size=8).hexdigest()
    return tuple(
        ToolCall(
            id=f"call_{turn}_{number}",
            name=call.name,
            arguments=call.arguments or {},
            status="malformed" if call.arguments is None or not call.name else "ok",
            raw=call.raw,
        )
        for number, call in enumerate(written)
    )


def _blocks(text: str, read: Callable[[str], tuple[str, dict[str, Any] | None]]) -> Reading:
    calls = []
    for block in _BLOCK.finditer(text):
        name, arguments = read(block[1])
        calls.append(WrittenCall(block[0], name, arguments if block[2] else None))
    return (_BLOCK.sub("", text).strip() if calls else text), calls


def _named(call: dict[str, Any] | None, keys: tuple[str, ...]) -> tuple[str, dict[str, Any] | None]:
    if call is None or not isinstance(call.get("name"), str):
        return "", None
    arguments: Any = next((call[key] for key in keys if key in call), {})
    if isinstance(arguments, str):  # some models write them as JSON in a string
        arguments = json_object(arguments)
    return call["name"], arguments if isinstance(arguments, dict) else None


def _tagged(body: str, tools: Sequence[ToolSchema]) -> tuple[str, dict[str, Any] | None]:
    function = _FUNCTION.match(body)
    if function is None:
        return "", None
    name, inside = function[1].strip(), function[2]
    if _PARAMETER.sub("", inside).strip():
        return name, None
    types = _types(name, tools)
    return name, {key.strip(): _value(text, types.get(key.strip())) for key, text in _PARAMETER.findall(inside)}


def _types(name: str, tools: Sequence[ToolSchema]) -> dict[str, Any]:
    functions = [tool.get("function", tool) for tool in tools]
    called: dict[str, Any] = next((function for function in functions if function.get("name") == name), {})
    properties = called.get("parameters", {}).get("properties", {})
    return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, dict)}


def _value(text: str, kind: object) -> Any:
    if kind == "string":  # values are not quoted
        return text
    found = json_object(f'{{"value": {text}}}')
    return text if found is None or set(found) != {"value"} else found["value"]


def _python_call(body: str, node: ast.expr) -> WrittenCall:
    raw = ast.get_source_segment(body, node) or body
    if not isinstance(node, ast.Call):
        return WrittenCall(raw)
    name = ast.unparse(node.func)
    try:
        if node.args or not all(keyword.arg for keyword in node.keywords):
            raise ValueError("arguments have names")
        arguments = {each.arg: ast.literal_eval(_Words().visit(each.value)) for each in node.keywords}
        return WrittenCall(raw, name, json_object(json.dumps(arguments)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return WrittenCall(raw, name)


class _Words(ast.NodeTransformer):
    """JSON's words for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node) if node.id in _WORDS else node
