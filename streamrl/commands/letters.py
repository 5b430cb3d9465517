"""What people see of the ledger's bytes: prompts, samples, scores and dead letters as plain data."""

from __future__ import annotations

from typing import Any

from streamrl import wire
from streamrl.errors import WireError
from streamrl.monitor.lines import printable, shortened
from streamrl.queues.records import DeadCause, DeadLetter


def prompt_data(data: bytes | None) -> dict[str, Any] | None:
    """A prompt as plain data; `{"unreadable": why}` for bytes that are no prompt."""
    if data is None:
        return None
    try:
        prompt = wire.decode(data, wire.Prompt)
    except WireError as error:
        return {"unreadable": error.message}
    return {
        "text": prompt.text,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "line": prompt.line,
        "tokens": len(prompt.token_ids),
    }


def sample_data(number: int, payload: bytes | None, score: bytes | None, cause: str | None) -> dict[str, Any]:
    """One response of a group: what was sampled by which versions, what the rewards said, or why it is dead."""
    found: dict[str, Any] = {"sample": number}
    try:
        if payload is not None:
            sample = wire.decode(payload, wire.Sample)
            found |= {
                "text": sample.text,
                "tokens": len(sample.token_ids),
                "finish": sample.finish,
                "versions": [[first, version] for first, version in sample.runs],
            }
        if score is not None:
            value = wire.decode(score, wire.SampleScore)
            found |= {"score": value.value, "parts": value.parts, "seconds": value.seconds}
    except WireError as error:
        found["unreadable"] = error.message
    if cause is not None:
        found["cause"] = cause
    return found


def parts_line(parts: dict[str, float]) -> str:
    """What each reward said, on one line."""
    return "  ".join(f"{printable(name)} {value:g}" for name, value in parts.items())


def response_line(response: dict[str, Any]) -> str:
    """One response, as `sample_data` has it, on one line."""
    parts = [f"response {response['sample']}:"]
    if "cause" in response:
        parts.append(f"dead, {printable(response['cause'])}")
    if "tokens" in response:
        versions = ",".join(f"v{version}" for _, version in response["versions"])
        parts.append(f"{response['tokens']} tokens ({response['finish']}) by {versions}")
    elif "cause" not in response:
        parts.append("not generated yet")
    if "score" in response:
        of = f" ({parts_line(response['parts'])})" if response["parts"] else ""
        parts.append(f"score {response['score']:g}{of}")
    if "text" in response:
        parts.append(shortened(response["text"]))
    return "  ".join(parts)


def letter_data(letter: DeadLetter) -> dict[str, Any]:
    """A dead letter as plain data; `sample` is null for a whole group."""
    return {
        "id": letter.entry,
        "group": letter.group_id,
        "sample": letter.sample,
        "attempt": letter.attempt,
        "stage": letter.stage,
        "why": letter.why,
        "deliveries": letter.deliveries,
        "at": letter.at,
        "detail": letter.detail,
        "prompt": prompt_data(letter.prompt),
    }


def letter_line(letter: dict[str, Any]) -> str:
    """One dead letter, as `letter_data` has it, among what is known of its group."""
    who = "group" if letter["sample"] is None else f"sample {letter['sample']}"
    return f"dead {who} in {letter['stage']}: {printable(letter['why'])}  ({letter['id']})"


def cause_data(cause: DeadCause) -> dict[str, Any]:
    """Dead letters of one cause as plain data; `id` is the newest letter with a traceback, times are seconds."""
    newest = cause.newest
    return {
        "why": newest.why,
        "stage": newest.stage,
        "samples": cause.samples,
        "groups": cause.groups,
        "first": cause.letters[0].at,
        "last": cause.letters[-1].at,
        "id": newest.entry,
    }
