"""Make what the distillation demo starts from, in `cache/` beside this file, once; `--force` makes it again.

The student is the model of the sort demo, which knows a right and a wrong rule. The teacher is that model after some
seconds with examples of the right rule alone.
"""

import random
import sys
from pathlib import Path

from rich.console import Console

from streamrl.atomic import whole_directory
from streamrl.demo import task
from streamrl.demo.prepare import DEMOS, main, starting_model, trained

HERE = Path(__file__).parent
TEACHER = HERE / "cache" / "teacher"


def right_lesson(source: random.Random) -> task.Lesson:
    """A prompt with its digits in ascending order."""
    while True:
        ids, written = task.lesson(source)
        answer = ids[written.index(True) : -1]
        if answer == sorted(answer):
            return ids, written


def make_teacher() -> None:
    sort = DEMOS["sort"]
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("teaching the teacher the right rule (some seconds)")
    teacher = sort._replace(lesson=right_lesson, share_of_steps=0.1, model=lambda: starting_model(sort))
    with whole_directory(TEACHER) as draft:
        trained(teacher, console).save_pretrained(draft)
        sort.tokenizer().save_pretrained(draft)


if __name__ == "__main__":
    code = main([str(HERE), *sys.argv[1:]])
    if not code and not TEACHER.exists():
        make_teacher()
    sys.exit(code)
