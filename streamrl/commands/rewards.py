"""`streamrl reward`: write a reward, try it on samples. Every command line reads this; it imports nothing heavy."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from streamrl.commands.options import JsonOption, SetOption
from streamrl.commands.reward_servers import reward_servers_app

reward_app = typer.Typer(no_args_is_help=True, help="Rewards: write one with its test, try it on samples; servers.")
reward_app.add_typer(reward_servers_app, name="servers")


class RewardForm(StrEnum):
    """Forms of a reward that `new` writes."""

    sample = "sample"
    group = "group"


@reward_app.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the module, e.g. my_reward; makes NAME.py.")],
    folder: Annotated[
        Path, typer.Option("--in", metavar="DIR", help="Where; beside the run file is where a run looks for it.")
    ] = Path(),
    form: Annotated[
        RewardForm, typer.Option("--form", help="sample: scores one response; group: compares those to one prompt.")
    ] = RewardForm.sample,
) -> int:
    """Write a reward that works, its test that passes, and samples to try it on. Nothing is overwritten.

    NAME.py is the reward, test_NAME.py its test (`pytest test_NAME.py`), NAME_samples.jsonl are samples for
    `streamrl reward test`. Stdout is the lines for the run file. 73 when one of the files is there already.
    """
    from streamrl.commands.reward_new import new as command

    return command(name, folder, form.value)


@reward_app.command("test")
def trial(
    reward: Annotated[
        str | None,
        typer.Argument(metavar="REWARD", help="Built-in name, module:Name, or one of --file; left out: all of --file."),
    ] = None,
    *,
    sample: Annotated[
        Path, typer.Option("--sample", metavar="FILE", help="JSON or JSON lines, a recording, or a run's archive.")
    ],
    file: Annotated[
        Path | None, typer.Option("--file", metavar="RUN.yaml", help="Run file: its rewards, models and plugin_paths.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="A run: servers that it started; without --file its rewards too."),
    ] = None,
    overrides: SetOption = None,
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="One of its args, e.g. tolerance=0.1"),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="verl|trl", help="The function is one of verl or of TRL.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many samples.")] = 1000,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long to wait for a service that is away.")
    ] = 30.0,
    json: JsonOption = False,
) -> int:
    """Score samples as a worker would, and show scores, times and errors with their tracebacks. 1 when one failed.

    A sample is `{"prompt": "2+2=", "response": "4", "answer": "4"}`; any other key is metadata. Each is tried once,
    with the deadline of the run file. `streamrl reward test gateway` waits for your program to fetch them.
    """
    from streamrl.commands.reward_trial import trial as command

    return command(
        reward,
        sample,
        run_file=file,
        run_dir=run,
        overrides=overrides or [],
        arguments=arguments or [],
        adapter=adapter,
        limit=limit,
        wait=wait,
        json=json,
    )
