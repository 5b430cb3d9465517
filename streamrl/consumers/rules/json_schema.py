"""The response is JSON that fits a schema."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from typing_extensions import override

from streamrl.consumers.processes import CallFailed
from streamrl.consumers.reward import RewardSample, Score
from streamrl.consumers.rules.in_processes import Processed, Verdict, require
from streamrl.consumers.rules.text import check_tag, inside
from streamrl.errors import DataError


class JsonSchema(Processed):
    """1 if the response is JSON that fits a JSON Schema, `parses` if it is JSON that does not fit, else 0.

    Exactly one of `schema`, `file` and `key` gives the schema. `$schema` names its draft, by default 2020-12. `format`
    is not checked, and references cannot leave the schema. NaN and Infinity are not JSON. Text is read as `json.loads`
    does, so numbers of more than 4,300 digits and very deep nesting are not JSON either.

    Parts: `json`, 1 if it is JSON; `expensive`, 1 if the check takes more than `seconds` or `memory_mib`.

    Args:
        schema: the schema itself.
        file: path of a file with it.
        key: key of the prompt's metadata with the schema, as an object or as text.
        tag: score only the text between the last `<tag>` and `</tag>`; without them the response gets 0.
        fence: score only the last Markdown fence; a response without one counts as a whole.
        parses: score of JSON that does not fit.
        expensive: verdict on a response whose check uses up `seconds` or the memory: `fail`, an error, since the schema
            may be the cause, or `wrong`, a 0.
        seconds: of CPU time for one response.
        memory_mib: MiB of address space of one process.
        processes: most processes in one reward worker; None: one per CPU, at most 4.
    """

    def __init__(
        self,
        *,
        schema: Mapping[str, Any] | None = None,
        file: str | None = None,
        key: str | None = None,
        tag: str | None = None,
        fence: bool = True,
        parses: float = 0.0,
        expensive: Verdict = "fail",
        seconds: float = 1.0,
        memory_mib: int = 256,
        processes: int | None = None,
    ) -> None:
        require("jsonschema", "json", "json_schema")
        if sum(source is not None for source in (schema, file, key)) != 1:
            raise ValueError("exactly one of schema, file and key says where the schema is")
        super().__init__(
            "json_schema",
            "json_schemas",
            {},
            seconds=seconds,
            memory_mib=memory_mib,
            processes=processes,
            expensive=expensive,
        )
        if file is not None:
            schema = _read(Path(file))
        self.schema = None if schema is None else check_schema(schema)
        self.key = key
        self.tag = check_tag(tag)
        self.fence = fence
        self.parses = parses

    @override
    async def score(self, sample: RewardSample) -> Score:
        schema = self.schema or self._schema_of(sample)
        text = inside(sample.text, self.tag)
        if text is None:
            return Score(0.0, {"json": 0.0, "expensive": 0.0})
        if self.fence:
            text = last_fence(text)
        try:
            found = await self.ask({"schema": schema, "text": text}, sample)
        except CallFailed as error:
            where = f"line {sample.prompt.line} of the data set" if self.schema is None else "the args"
            raise DataError(f"the schema of {where} cannot be used: {error.message}") from error
        if found is None:
            return Score(0.0, {"json": 0.0, "expensive": 1.0})
        value = 1.0 if found["valid"] else self.parses if found["json"] else 0.0
        return Score(value, {"json": float(found["json"]), "expensive": 0.0})

    def _schema_of(self, sample: RewardSample) -> str:
        assert self.key is not None
        schema = sample.prompt.metadata.get(self.key)
        if schema is None:
            raise DataError(f"line {sample.prompt.line} of the data set has no {self.key} with a schema")
        return schema if isinstance(schema, str) else orjson.dumps(schema).decode()


def check_schema(schema: Any) -> str:
    """The schema as text; `ValueError`: it is no schema, or refers to something outside of itself."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, UnknownDialect

    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"a schema is an object, not {type(schema).__name__}")  # noqa: TRY004 (a value of the run file)
    try:
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
        root = Resource.from_contents(schema, default_specification=DRAFT202012)
    except SchemaError as error:
        raise ValueError(f"no JSON Schema: {error.message} at {error.json_path}") from error
    except UnknownDialect as error:
        raise ValueError(f"no draft of JSON Schema is called {error.uri}") from error
    left = [(root, REGISTRY.resolver_with_root(root))]
    while left:
        resource, resolver = left.pop()
        if isinstance(resource.contents, Mapping) and "$ref" in resource.contents:
            try:
                resolver.lookup(resource.contents["$ref"])
            except Unresolvable as error:
                raise ValueError(f"the schema refers to {error.ref}, which is not in it") from error
        left.extend((inner, resolver.in_subresource(inner)) for inner in resource.subresources())
    return orjson.dumps(schema).decode()


def last_fence(text: str) -> str:
    parts = text.split("```")
    last = (len(parts) - 1) // 2 * 2 - 1
    if last < 0:
        return text
    language, newline, body = parts[last].partition("\n")
    return body if newline and (not language.strip() or language.lower().startswith("json")) else parts[last]


def _read(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"the schema {path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the schema {path} is not JSON: {error}") from error
