"""Algorithms by name: ours, or `module:name` of a user."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from streamrl.errors import ConfigError

_F = TypeVar("_F", bound=Callable[..., Any])


class Registry(Generic[_F]):
    """Functions by name, in the order of their registration; `kind` is the key that names them, for messages."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._functions: dict[str, _F] = {}

    def register(self, name: str) -> Callable[[_F], _F]:
        def add(function: _F) -> _F:
            assert name not in self._functions, name
            self._functions[name] = function
            return function

        return add

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    def resolve(self, name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
        """The function with its keyword arguments bound; `ConfigError` when there is none that takes them."""
        function = self._imported(name) if ":" in name else self._functions.get(name)
        if function is None:
            near = difflib.get_close_matches(name, self.names, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(self.names)}, or module:name"
            raise ConfigError(f"{self._kind}: there is no {name}", hint)
        keywords = {
            parameter.name: parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind in {parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD}
        }
        odd = [key for key in args if key not in keywords]
        if odd and not any(parameter.kind == parameter.VAR_KEYWORD for parameter in keywords.values()):
            raise ConfigError(
                f"{self._kind} {name} takes no argument {odd[0]}", f"it takes {', '.join(keywords) or 'none'}"
            )
        return partial(function, **args)

    def _imported(self, name: str) -> Callable[..., Any]:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self._kind} {name} cannot be imported: {error}", "name it module:function, and see plugin_paths"
            ) from error
        if not callable(found):
            raise ConfigError(f"{self._kind} {name} is no function", "name it module:function")
        return found  # type: ignore[no-any-return]
