"""Dead letters by cause, from letters as workers write them."""

from streamrl.queues.records import DeadLetter, by_cause, same_kind


def letter(entry, why, *, sample: int | None = 0, stage="reward", detail=""):
    return DeadLetter(f"{entry}-0", entry, sample, 1, why, stage, 1, detail, float(entry), None)


def test_what_differs_from_sample_to_sample_makes_no_cause_of_its_own():
    letters = [
        letter(1, "ValueError: could not convert string to float: 'four' (3 attempts) [my_reward]", detail="first"),
        letter(2, "deadline: my_reward: no score within 30 s (3 attempts)"),
        letter(3, "ValueError: could not convert string to float: 'it\\'s 2' (2 attempts) [my_reward]", detail="last"),
        letter(4, "ValueError: could not convert string to float: 'x' (3 attempts) [other]"),
        letter(5, "ValueError: could not convert string to float: 'y' (3 attempts) [my_reward]"),
        letter(5, "fewer scored samples than min_group", sample=None, stage="close"),
    ]
    causes = by_cause(letters)
    assert [[one.group_id for one in cause.letters] for cause in causes] == [[1, 3, 5], [2], [4], [5]]
    assert causes[0].newest.detail == "last"
    assert [(cause.samples, cause.groups) for cause in causes] == [(3, 0), (1, 0), (1, 0), (0, 1)]


FRAMES = """Traceback (most recent call last):
  File "/venv/streamrl/consumers/calls.py", line 1, in _attempt
    result = await call(sample)
  File "/home/me/rewards.py", line {line}, in score
    raise ValueError(words)
ValueError: words"""


def test_one_error_at_one_place_is_one_cause_whatever_it_says():
    """A bug with 13 messages is one cause; the same type raised elsewhere, or by another reward, is another."""
    words = "the one other that this some response answer text reward sample word thing"
    letters = [
        letter(entry, f"ValueError: no {word} here [mine]", detail=FRAMES.format(line=7))
        for entry, word in enumerate(words.split())
    ]
    assert len(letters) == 13
    (cause,) = by_cause(letters)
    assert (cause.samples, cause.messages) == (13, 13)
    other = [
        letter(20, "ValueError: no end here [mine]", detail=FRAMES.format(line=9)),
        letter(21, "KeyError: end [mine]", detail=FRAMES.format(line=7)),
        letter(22, "ValueError: no end here [yours]", detail=FRAMES.format(line=7)),
    ]
    assert [cause.samples for cause in by_cause([*letters, *other])] == [13, 1, 1, 1]


def test_errors_of_one_kind_and_one_reward_are_alike():
    alike = [
        letter(1, "ValueError: this response is bad: hello [my_reward]"),
        letter(2, "ValueError: that one, too (3 attempts) [my_reward]"),
    ]
    assert same_kind(alike)
    assert not same_kind([*alike, letter(3, "TypeError: this response is bad: hello [my_reward]")])
    assert not same_kind([*alike, letter(3, "ValueError: this response is bad: hello [other]")])
    assert not same_kind([*alike, letter(3, "ValueError: ... [my_reward]", stage="generate")])
    assert same_kind([letter(1, "no more than 12 tokens"), letter(2, "no more than 13 tokens")])
