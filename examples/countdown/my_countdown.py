"""The reward of the countdown task. The run file names it as `my_countdown:equation`."""

import ast
import operator
import re
from collections import Counter

from streamrl.consumers import RewardSample

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def equation(sample: RewardSample) -> float:
    """1 if the last answer is an expression of `nums`, each once, with the value `target`; both are in the data set."""
    answers = ANSWER.findall(sample.text)
    if not answers:
        return 0.0
    line = sample.prompt.metadata
    try:
        tree = ast.parse(answers[-1].strip(), mode="eval")
        numbers = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return float(numbers == Counter(line["nums"]) and abs(value(tree.body) - line["target"]) < 1e-5)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return 0.0


def value(node: ast.expr) -> float:
    """Of numbers, + - * / and brackets; `ValueError`: there is something else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError(ast.dump(node))
