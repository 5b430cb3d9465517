"""`streamrl`: the command line. It knows names and one-line helps; a command is imported when it is called.

Every command returns its exit code (table in docs/reference/cli.md). A `StreamrlError` becomes `error:` and `hint:` on
stderr and the exit code of its class. Any other exception is a bug of streamrl: exit code 70 and one line; `--debug`
adds the traceback.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final, Literal

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.main import get_command, get_group
from typing_extensions import override

from streamrl.errors import ExitCode, StreamrlError, unwrap

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "init": ("init:init", "Write a commented run.yaml, a reward plug-in, sample prompts and .env.example."),
    "up": ("up:up", "Start all roles of a run, on this machine or a cluster, and supervise them until it is finished."),
    "down": ("down:down", "End a run as the first Ctrl-C of `up` does: the roles finish what they hold."),
    "scale": ("scale:scale", "Change how many members a role has, until the run ends."),
    "render": ("render:app", "Write a run as files for Kubernetes, Slurm or Docker Compose."),
    "run": ("role:run_role", "Run one role in this process."),
    "status": ("status:status", "Show each role: state, pid, restarts, version, progress."),
    "lag": ("lag:lag", "Show what waits in each stream, for how long, and who holds it."),
    "logs": ("logs:logs", "Show the logs of all roles, or of some, in order of time."),
    "trace": ("groups:trace", "Show all that is known of one prompt group."),
    "audit": ("audit:audit", "Check that no group was lost and none was trained twice."),
    "clean": ("clean:clean", "Remove what killed processes of a stopped run left behind."),
    "export": ("export:export", "Write a checkpoint as a Hugging Face directory."),
    "rescore": ("rescore:rescore", "Score recorded groups with another reward, and compare."),
    "version": ("version:version", "Show the versions of streamrl, Python and the packages it uses."),
    "dead": ("dead:app", "Dead letters: list, show, replay, drop."),
    "config": ("config:app", "Show, validate and describe the configuration."),
    "engines": ("engines:app", "Engine servers: environments, checks, members of a run."),
    "reward": ("reward:app", "Rewards: write one with its test, try it on samples; servers."),
    "episode": ("episode:app", "Episodes: play one against the model, and show its turns."),
    "archive": ("archive:app", "The archive: groups with their scores, kept in files."),
    "weights": ("weights:app", "Versions of the weights: list, show, keep."),
}
"""Each command by name: where it is in `streamrl.commands`, and its line in `streamrl --help`."""

HELP_OPTIONS: Final = ["-h", "--help"]


def load_command(name: str) -> TyperCommand | TyperGroup:
    place, line = COMMANDS[name]
    module, _, attribute = place.partition(":")
    target = getattr(import_module(f"streamrl.commands.{module}"), attribute)
    if isinstance(target, typer.Typer):
        group = get_group(target)
        group.name, group.help = name, line
        tidy(group)
        return group
    single = typer.Typer(add_completion=False)
    single.command(name)(target)
    command: Any = get_command(single)
    assert isinstance(command, TyperCommand)
    tidy(command)
    return command


def tidy(command: Any) -> None:
    """Prepare the help of a command, and of all below it: join the lines of a paragraph, hide internal type names."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    # The help option is made from a context and kept by the command.
    context = command.context_class(command, help_option_names=HELP_OPTIONS)
    for parameter in [*command.params, command.get_help_option(context)]:
        hide_type(parameter)
    for below in getattr(command, "commands", {}).values():
        tidy(below)


def hide_type(parameter: Any) -> None:
    """Show no type for a flag (`<bool>` looks like a value), nor for an argument that has a name of its own."""
    if getattr(parameter, "is_flag", False):
        parameter.metavar = ""
    elif isinstance(parameter, TyperArgument) and parameter.metavar is not None:
        vars(parameter)["display_type_rich"] = lambda **_: None  # Typer has no setting for it


class LazyGroup(TyperGroup):
    """Shows its commands by their lines in `COMMANDS`, and imports the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name=name, help=line) for name, (_, line) in COMMANDS.items()}

    @override
    def get_params(self, ctx: Any) -> list[Any]:
        found = super().get_params(ctx)
        for parameter in found:
            hide_type(parameter)
        return found

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load_command(name), rest


app = typer.Typer(
    name="streamrl",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP_OPTIONS},
)


def _show_version(asked: bool) -> None:
    if asked:
        from streamrl.commands.version import version

        raise typer.Exit(version())


@app.callback()
def options(
    colour: Annotated[
        Literal["auto", "always", "never"],
        typer.Option("--color", envvar="STREAMRL_COLOR", help="Colour on stdout and stderr."),
    ] = "auto",
    debug: Annotated[bool, typer.Option("--debug", envvar="STREAMRL_DEBUG", help="Show tracebacks of errors.")] = False,
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Same as the command `version`.")
    ] = False,
) -> None:
    """Asynchronous, off-policy, streaming reinforcement learning of language models."""
    from streamrl.commands.output import choose_colour

    choose_colour(colour)
    _debug[0] = debug


_debug: list[bool] = [False]
_GLOBAL_FLAGS = ("--debug",)
_GLOBAL_VALUES = ("--color",)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every exception has become a message on stderr.

    `--debug` and `--color` may stand anywhere before a bare `--`.
    """
    _debug[0] = False
    try:
        code = app(_global_first(list(arguments)), prog_name="streamrl", standalone_mode=False)
    except StreamrlError as error:
        return _report(error)
    except SystemExit as end:
        # Typer and rich turn a broken pipe into this: the reader has read enough (`streamrl logs | head`).
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            return int(ExitCode.INTERRUPTED)
        cause = unwrap(group)
        return _report(cause) if isinstance(cause, StreamrlError) else _unexpected(cause)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the last reader of every exception
        return _unexpected(error)
    return int(code or 0)


def main() -> None:
    _open_streams()
    sys.exit(run(sys.argv[1:]))


def _open_streams() -> None:
    """Open closed streams on /dev/null (`streamrl up >&-`), because the next file would get their number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _global_first(arguments: list[str]) -> list[str]:
    """Move the global options to the front, where the group reads them."""
    front: list[str] = []
    rest: list[str] = []
    items = iter(arguments)
    for item in items:
        if item == "--":
            rest.extend([item, *items])
        elif item in _GLOBAL_FLAGS or item.startswith(tuple(f"{name}=" for name in _GLOBAL_VALUES)):
            front.append(item)
        elif item in _GLOBAL_VALUES:
            front.extend([item, *([value] if (value := next(items, None)) is not None else [])])
        else:
            rest.append(item)
    return front + rest


def _report(error: StreamrlError) -> int:
    if _debug[0]:
        _traceback()
    _complain(error.message, error.hint)
    return int(error.exit_code)


def _unexpected(error: BaseException) -> int:
    """Report an error other than `StreamrlError`: a wrong command line (2), or a bug (70)."""
    render = getattr(error, "format_message", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        return int(ExitCode.USAGE)  # the help has been shown
    if render is not None:
        context = getattr(error, "ctx", None)
        _complain(
            str(render()).strip().replace("Value error, ", ""),
            f"{context.command_path} --help" if context is not None else "",
        )
        return int(getattr(error, "exit_code", ExitCode.USAGE))
    if isinstance(error, typer.Abort):
        _complain("given up", "")
        return int(ExitCode.FAILURE)
    if _debug[0]:
        _traceback()
    if _comes_of_interrupt(error):
        return int(ExitCode.INTERRUPTED)
    _complain(f"{type(error).__name__}: {error}", "this is a bug of streamrl; --debug shows the traceback")
    return int(ExitCode.INTERNAL)


def _comes_of_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error; during the creation of a class, for example, it comes out as `RuntimeError`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _complain(message: str, hint: str) -> None:
    from streamrl.commands.output import wants_colour

    bold, dim, plain = ("\x1b[1;31m", "\x1b[2m", "\x1b[0m") if wants_colour(sys.stderr) else ("", "", "")
    sys.stderr.write(f"{bold}error:{plain} {message}\n")
    if hint:
        sys.stderr.write(f"{dim}hint:{plain} {hint}\n")
    sys.stderr.flush()


def _traceback() -> None:
    import traceback

    traceback.print_exc()
