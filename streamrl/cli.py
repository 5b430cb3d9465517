"""`streamrl`: the command line. Each command imports its own module, so that a quick look starts quickly.

Every command returns its exit code (docs/reference/cli.md). Errors made on purpose become `error:` and `hint:` on
stderr and the exit code of their class; anything else is a bug of ours: 70 and one line, with `--debug` the traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from streamrl.commands.engines import engines_app
from streamrl.commands.options import EveryOption, JsonOption, RunOption, SetOption, WatchOption
from streamrl.commands.rewards import reward_app
from streamrl.commands.scores import archive_app, rescore, score_app
from streamrl.commands.weights import weights_app
from streamrl.errors import ExitCode, StreamrlError, unwrap

app = typer.Typer(
    name="streamrl",
    help="Asynchronous, off-policy, streaming reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
dead_app = typer.Typer(no_args_is_help=True, help="Dead letters: list, show, replay, drop.")
config_app = typer.Typer(no_args_is_help=True, help="The configuration: show with origins, validate, JSON schema.")
app.add_typer(dead_app, name="dead")
app.add_typer(config_app, name="config")
app.add_typer(engines_app, name="engines")
app.add_typer(reward_app, name="reward")
app.add_typer(score_app, name="score")
app.add_typer(archive_app, name="archive")
app.add_typer(weights_app, name="weights")


class ColourChoice(StrEnum):
    """Values of `--color`."""

    auto = "auto"
    always = "always"
    never = "never"


class ScreenChoice(StrEnum):
    """Values of `up --screen`."""

    auto = "auto"
    live = "live"
    plain = "plain"
    logs = "logs"


class TemplateChoice(StrEnum):
    """Values of `init --template`."""

    own = "own"
    sort = "sort"


class Stage(StrEnum):
    """Roles that `run` starts."""

    redis = "redis"
    feeder = "feeder"
    rollout = "rollout"
    reward = "reward"
    reward_model = "reward_model"
    learner = "learner"
    recorder = "recorder"
    player = "player"


RunFile = Annotated[Path | None, typer.Argument(metavar="RUN.yaml", help="Run file.")]


def _show_version(asked: bool) -> None:
    if asked:
        from streamrl.commands.version import version as command

        raise typer.Exit(command(json=False))


@app.callback()
def options(
    colour: Annotated[
        ColourChoice, typer.Option("--color", envvar="STREAMRL_COLOR", help="Colour on stdout and stderr.")
    ] = ColourChoice.auto,
    debug: Annotated[bool, typer.Option("--debug", envvar="STREAMRL_DEBUG", help="Tracebacks of errors.")] = False,
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="As the command `version`.")
    ] = False,
) -> None:
    """Asynchronous, off-policy, streaming reinforcement learning of language models."""
    from streamrl.commands.output import choose_colour

    choose_colour(colour.value)
    _debug[0] = debug


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where; made when missing.")] = Path(),
    template: Annotated[
        TemplateChoice,
        typer.Option(help="own: for a model, prompts and rewards of yours; sort: a task that runs without network."),
    ] = TemplateChoice.own,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> int:
    """Write a commented run.yaml, a reward plug-in, sample prompts and .env.example.

    --template sort makes a small model and its prompts instead, in about a minute: the run needs no network, no GPU.
    """
    from streamrl.commands.init import init as command

    return command(folder, template.value, force)


@app.command()
def up(
    file: RunFile = None,
    *,
    run: RunOption = None,
    overrides: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the configuration; start nothing.")] = (
        False
    ),
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Check everything and make the run directory; start nothing.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Put aside what is in the run directory.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the run directory.")] = False,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Record complete groups in RUN_DIR/recording; train nothing.")
    ] = False,
    train_only: Annotated[
        Path | None, typer.Option("--train-only", metavar="FILE|DIR", help="Train recorded groups; generate nothing.")
    ] = None,
    screen: Annotated[ScreenChoice, typer.Option(help="What is shown meanwhile.")] = ScreenChoice.auto,
) -> int:
    """Start all roles of a run on this machine and supervise them until it is finished."""
    from streamrl.commands.up import recording_overrides
    from streamrl.commands.up import up as command

    until: Literal["plan", "prepare", "run"] = "plan" if dry_run else "prepare" if prepare else "run"
    changes = [*(overrides or []), *recording_overrides(rollout_only=rollout_only, train_only=train_only)]
    return command(file, run, changes, until=until, fresh=fresh, resume=resume, screen=screen.value)


@app.command("run")
def run_role(
    role: Annotated[Stage, typer.Argument(help="Which role.")],
    run: RunOption = None,
    index: Annotated[int, typer.Option("--index", min=0, help="Which of several: replica, worker or rank.")] = 0,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Which of reward_models; role reward_model only.")
    ] = None,
) -> int:
    """Run one role of a run in this process: what the supervisor, Ray or Kubernetes start."""
    from streamrl.commands.role import role as command

    command(role.value, run, index, model)


@app.command()
def status(
    run: RunOption = None, json: JsonOption = False, watch: WatchOption = False, every: EveryOption = 1.0
) -> int:
    """Show each role: state, pid, restarts, version, progress. 0 all ready, 1 degraded, 69 down."""
    from streamrl.commands.status import status as command

    return command(run, json=json, every=every if watch else None)


@app.command()
def lag(
    *,
    run: RunOption = None,
    json: JsonOption = False,
    watch: WatchOption = False,
    every: EveryOption = 1.0,
    warn: Annotated[int | None, typer.Option(min=0, metavar="N", help="Exit 1 from this lag of a stream on.")] = None,
    crit: Annotated[int | None, typer.Option(min=0, metavar="N", help="Exit 4 from this lag of a stream on.")] = None,
) -> int:
    """Show what waits in each stream, for how long, and who holds what."""
    from streamrl.commands.lag import lag as command

    return command(run, json=json, every=every if watch else None, warn=warn, crit=crit)


@app.command()
def logs(
    *,
    roles: Annotated[list[str] | None, typer.Argument(metavar="ROLE", help="rollout, rollout.0, ...")] = None,
    run: RunOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of the past.")] = 100,
    json: JsonOption = False,
) -> int:
    """Show the log of all roles, or of some, in order of time."""
    from streamrl.commands.logs import logs as command

    return command(run, roles or [], lines=lines, follow=follow, json=json)


@app.command()
def trace(
    group: Annotated[int, typer.Argument(min=0, metavar="GROUP", help="Id of the group.")],
    run: RunOption = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="A held-out group.")] = False,
    json: JsonOption = False,
) -> int:
    """Show all that is known of one prompt group, alive or not. 1 when nothing is."""
    from streamrl.commands.trace import trace as command

    return command(run, group, evaluation=evaluation, json=json)


@app.command()
def audit(run: RunOption = None, json: JsonOption = False) -> int:
    """Prove that nothing was lost and nothing was trained twice. 1 when it was."""
    from streamrl.commands.audit import audit as command

    return command(run, json=json)


@app.command()
def clean(run: RunOption = None, json: JsonOption = False) -> int:
    """Remove what killed processes of a stopped run left behind: shared memory, temporary files, a Redis server."""
    from streamrl.commands.clean import clean as command

    return command(run, json=json)


@app.command()
def export(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory to write.")],
    run: RunOption = None,
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", min=0, metavar="STEP", help="Step of the checkpoint; else the newest.")
    ] = None,
    average: Annotated[bool, typer.Option("--ema", help="The average of the weights (learner.ema).")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a checkpoint as a Hugging Face directory; the run need not be running."""
    from streamrl.commands.export import export as command

    return command(run, checkpoint, out, average=average, force=force, json=json)


app.command("rescore")(rescore)


@app.command()
def version(json: JsonOption = False) -> int:
    """Show the version of streamrl and of what it stands on."""
    from streamrl.commands.version import version as command

    return command(json=json)


EvalOption = Annotated[bool, typer.Option("--eval", help="Held-out groups instead of training groups.")]
Letters = Annotated[list[str], typer.Argument(metavar="ID", help="Ids as `dead ls` shows them, or all.")]


@dead_app.command("ls")
def dead_ls(
    run: RunOption = None,
    limit: Annotated[int, typer.Option("-n", "--lines", min=1, help="At most so many causes, or letters.")] = 100,
    each: Annotated[bool, typer.Option("--each", help="One by one, newest first.")] = False,
    evaluation: EvalOption = False,
    json: JsonOption = False,
) -> int:
    """List dead letters by cause, the largest first, each with its newest traceback."""
    from streamrl.commands.dead import ls as command

    return command(run, limit=limit, each=each, evaluation=evaluation, json=json)


@dead_app.command("show")
def dead_show(
    letter: Annotated[str, typer.Argument(metavar="ID", help="Id as `dead ls` shows it.")],
    run: RunOption = None,
    evaluation: EvalOption = False,
    json: JsonOption = False,
) -> int:
    """Show one dead letter with its detail (traceback)."""
    from streamrl.commands.dead import show as command

    return command(run, letter, evaluation=evaluation, json=json)


@dead_app.command("replay")
def dead_replay(
    letters: Letters, run: RunOption = None, evaluation: EvalOption = False, json: JsonOption = False
) -> int:
    """Admit dead groups again, as there is room: generated and scored anew. 1 when one of them cannot be."""
    from streamrl.commands.dead import replay as command

    return command(run, letters, evaluation=evaluation, json=json)


@dead_app.command("drop")
def dead_drop(
    letters: Letters,
    run: RunOption = None,
    evaluation: EvalOption = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> int:
    """Throw dead letters away for good; whole groups count as dropped from then on."""
    from streamrl.commands.dead import drop as command

    return command(run, letters, evaluation=evaluation, yes=yes, json=json)


@config_app.command("show")
def config_show(
    file: RunFile = None,
    run: RunOption = None,
    overrides: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    json: JsonOption = False,
) -> int:
    """Show the resolved configuration of a run file, or with --run of a run."""
    from streamrl.commands.config import show as command

    return command(file, run, overrides or [], origin=origin, json=json)


@config_app.command("validate")
def config_validate(file: RunFile = None, overrides: SetOption = None, json: JsonOption = False) -> int:
    """Check a run file as `up --dry-run` does: keys, model, data, rewards, and what the run needs of this machine."""
    from streamrl.commands.config import validate as command

    return command(file, overrides or [], json=json)


@config_app.command("schema")
def config_schema() -> int:
    """Print the JSON Schema of a run file, for editors."""
    from streamrl.commands.config import schema as command

    return command()


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
        # Typer and rich make this of a broken pipe: the reader has what it wants (`streamrl logs | head`).
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
    """Run the command line of this process."""
    sys.exit(run(sys.argv[1:]))


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
    """Render what is no error of ours: a wrong command line (2), or a bug (70)."""
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
    """Whether Ctrl-C is behind an error: one that meets the making of a class, say, comes out as `RuntimeError`."""
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
