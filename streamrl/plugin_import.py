"""From an import path in the run file (`module:Name`) to the object of the user, with errors that say what to fix."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from streamrl.errors import PluginError, StreamrlError

_Choice = TypeVar("_Choice", bound=str)


def look_in(plugin_paths: Iterable[Path]) -> list[Path]:
    """Put directories and the working directory at the end of `sys.path`, so that they shadow nothing installed."""
    paths = [*plugin_paths, Path.cwd()]
    for path in map(str, paths):
        if path not in sys.path:
            sys.path.append(path)
    importlib.invalidate_caches()
    return paths


def import_plugin(use: str, paths: Sequence[Path], *, role: str = "reward") -> Any:
    """Return what `module:Name` means; `role` says in errors what it is for. PluginError if that cannot be imported."""
    module_name, _, attribute = use.partition(":")
    if not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise PluginError(f"{role} {use} is not an import path", "write module:Name, for example my_code:Name")
    module = _import_module(f"{role} {use}", module_name, paths)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            where = getattr(module, "__file__", module_name)
            names = [name for name in dir(target) if not name.startswith("_")]
            raise PluginError(f"{role} {use}: {where} has no {attribute}", closest(part, names))
        target = getattr(target, part)
    return target


def _import_module(what: str, name: str, paths: Sequence[Path]) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):  # else a module that it imports
            files = {path.stem for folder in paths if folder.is_dir() for path in folder.glob("*.py")}
            looked = ", ".join(dict.fromkeys(map(str, paths)))
            hint = closest(name, files) or f"looked in {looked} and in what is installed; see plugin_paths"
            raise PluginError(f"{what}: there is no module {name}", hint) from error
        raise PluginError(f"{what}: importing {name} fails: {last_line(error)}", _import_hint(error)) from error


def _import_hint(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"install it beside streamrl: {sys.executable} -m pip install {package}, if its package has that name"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file, line = frame.filename, frame.lineno
    if isinstance(error, SyntaxError):
        file, line = error.filename or file, error.lineno
    return f"raised in {file}, line {line}; streamrl --debug shows the traceback"


def build_plugin(target: Callable[..., Any], what: str, args: Mapping[str, Any]) -> Any:
    """Call a class with its `args` of the run file; `what` names it in errors. PluginError if that fails."""
    try:
        inspect.signature(target).bind(**args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(target).parameters) or "no arguments"
        raise PluginError(f"{what}: args do not fit: {error}", f"it takes: {takes}") from error
    except ValueError:
        pass  # a class without a readable signature (C extension): the constructor is the check
    if inspect.isabstract(target):
        missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
        raise PluginError(f"{what} is abstract", f"implement {missing}")
    try:
        return target(**args)
    except StreamrlError as error:
        raise PluginError(f"{what} cannot be built: {error.message}", error.hint) from error
    except Exception as error:
        raise PluginError(f"{what} cannot be built: {last_line(error)}", "see its args") from error


def one_of(name: str, value: _Choice, known: Sequence[str]) -> _Choice:
    """`value` of the arg `name`; `ValueError` if it is not a known one."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(known)}")
    return value


def closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def last_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
