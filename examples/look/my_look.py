"""Two pictures, one after the other, and a question about each. The run file names it as `my_look:Look`."""

from look_task import png

from streamrl.images.encoded import data_url
from streamrl.producers.episodes import Chat, Episode, Task


class Look(Episode):
    """Shows the pictures of a line of the data set, which has the colours of their squares."""

    deterministic = True  # pictures are drawn again alike, so another replica may go on with a sample

    async def run(self, task: Task, chat: Chat) -> None:
        """Ask about each picture; the reward is for the last reply."""
        messages = []
        for colours, question in zip(task.metadata["pictures"], task.metadata["questions"], strict=True):
            picture = {"type": "image_url", "image_url": {"url": data_url(png(colours))}}
            messages.append({"role": "user", "content": [picture, {"type": "text", "text": question}]})
            messages.append((await chat(messages)).message)
