"""The reward `judge`: a chat model is asked what it thinks of a response, and its answers become a number."""

from streamrl.consumers.judge.reward import Judge

__all__ = ["Judge"]
