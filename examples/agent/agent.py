"""An agent on the `openai` package. It is the same for a run, for vLLM, or for OpenAI: it knows only its environment.

`OPENAI_BASE_URL` and `OPENAI_API_KEY` name the server, `STREAMRL_TASK` a file with the task.
"""

import json
import os
from pathlib import Path
from typing import Any

from openai import OpenAI

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Return the number of a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def answer(call: Any, numbers: dict[str, int]) -> str:
    """The result of a call, or what is wrong with it: the model may write anything."""
    try:
        return str(numbers[json.loads(call.function.arguments)["key"]])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}: {error}"


def main() -> None:
    task = json.loads(Path(os.environ["STREAMRL_TASK"]).read_text())
    client, messages = OpenAI(), task["messages"]
    while True:
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[LOOK_UP]).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return
        for call in reply.tool_calls:
            result = answer(call, task["metadata"]["numbers"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


main()
