"""`streamrl trace GROUP`: one prompt group from its admission to its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from streamrl.commands import output
from streamrl.commands.letters import letter_data, letter_line, prompt_data, response_line, sample_data
from streamrl.commands.options import EvalOption, GroupArgument, JsonOption, RunOption
from streamrl.commands.rundir import RunDirectory, find_run, ledgers_to_look
from streamrl.errors import ExitCode, WireError
from streamrl.monitor.lines import shortened
from streamrl.queues.records import LedgerState

SCHEMA = "streamrl.trace/1"


def trace(group: GroupArgument, run: RunOption = None, evaluation: EvalOption = False, json: JsonOption = False) -> int:
    """Show all that is known of one prompt group, in Redis and in the run's files. Exit code 1 if nothing is."""
    found = asyncio.run(_trace(find_run(run), group, evaluation=evaluation))
    if json:
        output.write_json(SCHEMA, found)
    else:
        output.write("\n".join(_lines(found)))
    return int(ExitCode.FAILURE if found["state"] == "unknown" else ExitCode.OK)


async def _trace(run: RunDirectory, group_id: int, *, evaluation: bool) -> dict[str, Any]:
    async with ledgers_to_look(run) as opened:
        ledger = opened.evaluation if evaluation else opened.train
        known = await ledger.trace(group_id)
        state = await ledger.state()
    found: dict[str, Any] = {
        "group": group_id,
        "evaluation": evaluation,
        "state": "unknown",
        "letters": [],
        "record": None,
    }
    if known is not None:
        found |= {key: value for key, value in known.items() if key not in _BYTES}
        found["letters"] = [letter_data(letter) for letter in known.get("letters", ())]
    found.pop("gid", None)
    if known is not None and "samples" in known:
        found["prompt"] = prompt_data(known["prompt"])
        found["responses"] = [
            sample_data(k, known["payloads"].get(k), known["scores"].get(k), known["causes"].get(k))
            for k in range(known["samples"])
        ]
    record = _evaluated(run.path, group_id) if evaluation else _trained(run.path, group_id, state)
    if record is not None:
        # The disk is the truth for what was trained; Redis may have been set back since.
        found["record"] = record
        if found["state"] in ("unknown", "retired"):
            found["state"] = "evaluated" if evaluation else "trained"
    return found


_BYTES = frozenset({"prompt", "payloads", "scores", "causes", "letters"})


def _trained(run_dir: Path, group_id: int, state: LedgerState) -> dict[str, Any] | None:
    """The durable record of a group that today's weights were trained on."""
    from streamrl.learner.checkpoint import Checkpoints
    from streamrl.learner.lineage import read_record

    checkpoints = Checkpoints(run_dir / "checkpoints", make=False)
    newest = next(checkpoints.loadable(state.base, state.base_epoch, state.checkpoint), None)
    try:
        frames = read_record(run_dir, newest.record) if newest else ()
        return next((frame for frame in frames if frame.get("gid") == group_id), None)
    except (WireError, OSError) as error:
        output.note(f"warning: {error}")
        return None


def _evaluated(run_dir: Path, group_id: int) -> dict[str, Any] | None:
    from streamrl.monitor.tail import Tail

    return next((line for line in Tail(run_dir / "evaluation.jsonl").read() if line.get("gid") == group_id), None)


def _lines(found: dict[str, Any]) -> list[str]:
    kind = "held-out group" if found["evaluation"] else "group"
    lines = [f"{kind} {found['group']}: {found['state']}{_why(found)}"]
    facts = ("attempt", "version", "samples", "min_group", "without_payload", "without_score", "crashes")
    if "attempt" in found:
        whole = "  scored whole" if found["whole"] else ""
        lines.append("  " + "  ".join(f"{key} {found[key]}" for key in facts) + whole)
    if found.get("doom"):
        lines.append(f"  will be dead: {found['doom']}")
    if found.get("prompt"):
        lines.append(f"  prompt  {shortened(found['prompt'].get('text', found['prompt']))}")
    lines.extend("  " + response_line(response) for response in found.get("responses", ()))
    lines.extend(f"  {letter_line(letter)}" for letter in found["letters"])
    if found["record"] is not None:
        lines.append("  " + "  ".join(f"{key} {value}" for key, value in found["record"].items() if key != "gid"))
    return lines


def _why(found: dict[str, Any]) -> str:
    return f" ({found['why']})" if "why" in found else ""
