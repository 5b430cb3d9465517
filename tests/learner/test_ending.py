"""When a run is over."""

from types import SimpleNamespace

from streamrl.learner.ending import Ending


class Board:
    """What the roles say of themselves."""

    def __init__(self):
        self.roles = {"feeder.0": {}, "learner.0": {"accuracy": "1.0"}}

    async def read(self, prefix=""):
        return {name: fields for name, fields in self.roles.items() if name.startswith(prefix)}


async def test_the_learner_hears_of_an_accuracy_at_the_next_step():
    board = Board()
    learner = SimpleNamespace(steps=None, stop_at_accuracy=0.9)
    ending = Ending(SimpleNamespace(learner=learner), board)
    assert await ending.reason(1) is None
    board.roles["feeder.0"] = {"accuracy": "0.89"}
    assert await ending.reason(2) is None
    board.roles["feeder.0"] = {"accuracy": "0.9"}
    assert await ending.reason(3) == "accuracy"
    assert ending.accuracy == 0.9
