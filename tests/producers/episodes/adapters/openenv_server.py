"""A real OpenEnv server of a game, run by the interpreter of `.adapters/openenv`. Arguments: fd of its socket, a file.

Each environment writes a line into the file when it is closed.
"""

import socket
import sys
import time
from pathlib import Path

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int
    polite: bool = False


class Told(Observation):
    text: str


class Game(Environment[Guess, Told, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, low=0, **kwargs):
        self._state = State(episode_id=episode_id)
        self.secret = low + seed % 10
        return Told(text=f"guess from {low}" + (f", it is {self.secret}" if kwargs.get("told") else ""))

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.number == 13:
            raise RuntimeError("the dice are gone")
        if action.number == 99:
            time.sleep(1)
        thanks = ", thank you" if action.polite else ""
        if action.number == self.secret:
            return Told(text=f"right{thanks}", done=True, reward=1.0)
        return Told(text=f"wrong{thanks}", reward=-0.25 if action.number > self.secret else None)

    def close(self):
        with Path(sys.argv[2]).open("a") as file:
            file.write("closed\n")

    @property
    def state(self):
        return self._state


app = create_app(Game, Guess, Told, env_name="game", max_concurrent_envs=3)
listening = socket.socket(fileno=int(sys.argv[1]))
config = uvicorn.Config(app, log_level="error", ws_ping_interval=0.2, ws_ping_timeout=0.2)
uvicorn.Server(config).run(sockets=[listening])
