"""Rewards that are rules: no model and no network, one file per family.

Rules of microseconds run in the event loop (`instant`). What a response could make expensive, on purpose or not, runs
in processes that can be killed (`processed`).
"""

from streamrl.consumers.rules.code import Code
from streamrl.consumers.rules.format import Format
from streamrl.consumers.rules.json_schema import JsonSchema
from streamrl.consumers.rules.length import Length
from streamrl.consumers.rules.match import ExactMatch, NumberMatch, last_number
from streamrl.consumers.rules.math_answer import MathAnswer
from streamrl.consumers.rules.regex import Regex
from streamrl.consumers.rules.repetition import Repetition

__all__ = [
    "Code",
    "ExactMatch",
    "Format",
    "JsonSchema",
    "Length",
    "MathAnswer",
    "NumberMatch",
    "Regex",
    "Repetition",
    "last_number",
]
