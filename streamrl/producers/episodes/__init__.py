"""Episodes: turns, tools and agents between a policy and what answers it, with exact tokens.

What users write and call: an `Episode`, which gets a `Task` and talks through a `Chat`. `python_tool` runs programs.
"""

from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.run_python import python_tool
from streamrl.score import Score

__all__ = ["Chat", "Episode", "Score", "Task", "python_tool"]
