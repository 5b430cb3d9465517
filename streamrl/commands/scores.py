"""`streamrl score` and `streamrl rescore`: look at scores, and make them again.

Every command line reads this module: each command imports what it needs itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamrl.commands.archive import FromOption, SinceOption
from streamrl.commands.options import EvalOption, JsonOption, RunOption, SetOption

score_app = typer.Typer(no_args_is_help=True, help="Scores: what the rewards said of each response of a group.")


@score_app.command("show")
def show(
    group: Annotated[int, typer.Argument(min=0, metavar="GROUP", help="Id of the group.")],
    run: RunOption = None,
    evaluation: EvalOption = False,
    width: Annotated[int, typer.Option("--width", min=10, help="Characters of a text that are shown.")] = 200,
    json: JsonOption = False,
) -> int:
    """Show each response of a group: text, score, parts, seconds, or why it died. 1 when nothing is kept of it.

    A live group is read from Redis, one that has left it from the archive (archive.enabled) or the recording of the
    run. Scores that `streamrl rescore` made are shown beside the first ones. --json has the whole texts.
    """
    from streamrl.commands.score_show import show as command

    return command(run, group, evaluation=evaluation, width=width, json=json)


def rescore(
    *,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward", metavar="REWARD", help="Built-in name, module:Name, or one of the run or --file; else all."
        ),
    ] = None,
    into: Annotated[str, typer.Option("--into", metavar="NAME", help="Name of the new scores: RUN_DIR/rescored/NAME.")],
    run: RunOption = None,
    source: FromOption = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="RUN.yaml", help="Rewards, scoring and models of a run file; else of the run."),
    ] = None,
    overrides: SetOption = None,
    arguments: Annotated[
        list[str] | None, typer.Option("--arg", metavar="KEY=VALUE", help="One of its args, e.g. tolerance=0.1")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="verl|trl", help="The function is one of verl or of TRL.")
    ] = None,
    since: SinceOption = None,
    evaluation: EvalOption = False,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Responses at a time; groups where the reward compares.")
    ] = 16,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many groups.")] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Where `same side` draws the line: right is above.")
    ] = 0.5,
    differ: Annotated[int, typer.Option("--differ", min=0, help="Responses to show that differ most.")] = 10,
    drop_failed: Annotated[
        bool, typer.Option("--drop-failed", help="Write groups that lost responses to failures too.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Throw away the scores of this name first.")] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE.png", help="Draw both sets of scores (matplotlib).")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Score recorded groups with another reward, and compare: agreement, correlation, histogram, what differs most.

    `streamrl rescore --reward my_rewards:Stricter --into strict --since 2h`; the run is not touched. The new scores are
    a recording, RUN_DIR/rescored/NAME: `--from` reads it, and `streamrl up --train-only` trains it. The same call again
    goes on where it was stopped, and tries again what failed. A sample that the reward fails on is listed and has no
    new score: never a 0. 1 when there was one.
    """
    from streamrl.commands.rescore import Options
    from streamrl.commands.rescore import rescore as command

    options = Options(
        into=into,
        source=source,
        reward=reward,
        file=file,
        overrides=overrides or [],
        arguments=arguments or [],
        adapter=adapter,
        since=since,
        evaluation=evaluation,
        concurrency=concurrency,
        limit=limit,
        threshold=threshold,
        differ=differ,
        drop_failed=drop_failed,
        force=force,
        picture=picture,
    )
    return command(run, options, json=json)
