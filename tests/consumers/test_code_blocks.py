import pytest

from streamrl.consumers.rules.code import code_blocks, program_in

PYTHON = ("python", "py", "")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("Thus:\n\n   ```Python3 title=x\nprint(1)\n```\ndone", None),
        ("```py\nfirst\n```\nbetter:\n```\nsecond\n```", "second\n"),
        ("```python\nfirst\n```\nrun it:\n```bash\npython x.py\n```", "first\n"),
        ("````python\n```\ninner\n```\n````", "```\ninner\n```\n"),
        ("~~~python\na = '```'\n~~~", "a = '```'\n"),
        ("```python\ncut off by the lim", None),
        ("```python\nwhole\n```\n```python\ncut off", "whole\n"),
        ("```inline``` is no fence\n```python\nx\n```", "x\n"),
        ("no code", None),
        ("", None),
        ("```python\n```", ""),
        ("1. So:\n   ```python\n   def f():\n       return 1\n\n   ```\n", "def f():\n    return 1\n\n"),
        ("- ```python\n  x = 1\n  ```\n", "x = 1\n"),
        ("10. ~~~python\n    x = 1\n  # less\n    ~~~", "x = 1\n# less\n"),
        ("* So:\n\t```python\n\tif x:\n\t\ty\n\t```", "if x:\n\ty\n"),
        ("  ```python\nif x:\n  y\n  ```", "if x:\n  y\n"),
        ("a - ```python\nx\n```", None),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
    ],
)
def test_the_last_closed_block_in_the_language_is_the_program(text, program):
    assert program_in(text, PYTHON, fenced=True) == program


def test_without_fences_the_whole_response_is_the_program_when_that_is_asked_for():
    assert program_in("print(1)", PYTHON, fenced=False) == "print(1)"
    assert program_in("```python\nx\n```", PYTHON, fenced=False) == "x\n"
    assert program_in("```ruby\nx\n```", PYTHON, fenced=False) is None


@pytest.mark.parametrize("text", ["`" * 500_000, "```\n" * 100_000, "~~~a\n" * 100_000, "```" + " " * 500_000 + "`"])
def test_time_grows_with_the_length_only(text):
    assert all(block.language in {"", "~~~a"} for block in code_blocks(text))
