"""Episodes: turns, tools and agents between a policy and what answers it, with exact tokens.

What users write and call: an `Episode`, which gets a `Task` and talks through a `Chat`.
"""

from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.score import Score

__all__ = ["Chat", "Episode", "Score", "Task"]
