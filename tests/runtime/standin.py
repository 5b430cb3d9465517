"""A tiny process that stands for a role: `standin.py NAME BEHAVIOUR...`; no streamrl import except the lifeline.

Behaviours: ready, beat, beats and serve (both until SIGTERM), finish:SECONDS, exit:CODE, deaf (ignores SIGTERM),
crash-first:CODE,
gone-first, chatter:LINES, grandchild, say:TEXT, error:TEXT, fenced:TEXT, wait-for:FILE, hang.
Each appends what happens to it to the file `journal` in the working directory.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

name, *behaviours = sys.argv[1:]
status = int(os.environ["STREAMRL_STATUS_FD"])
lifeline = int(os.environ["STREAMRL_LIFELINE_FD"])
asked = []
journal = os.open("journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(event):
    os.write(journal, f"{name} {event} {os.getpid()}\n".encode())


def on_term(number, frame):
    note("term")
    asked.append(number)  # an Event would wait for ever for its lock, if this interrupts the one that holds it


def asked_within(seconds):
    end = time.monotonic() + seconds
    while not asked and time.monotonic() < end:
        time.sleep(0.01)
    return bool(asked)


def first_time():
    marker = f"{name}.started"
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def tell(line):
    os.write(status, line.encode() + b"\n")


def watch():
    os.read(lifeline, 1)
    note("orphaned")
    os.kill(os.getpid(), signal.SIGKILL)


signal.signal(signal.SIGTERM, on_term)
threading.Thread(target=watch, daemon=True).start()
note("start")
for behaviour in behaviours:
    verb, _, value = behaviour.partition(":")
    if verb == "ready":
        tell("READY=1")
    elif verb == "beat":
        tell("BEAT=1")
    elif verb == "beats":
        while not asked_within(0.1):
            tell("BEAT=1")
            note("beat")
    elif verb == "serve":
        while not asked_within(1.0):
            pass
    elif verb == "finish":
        asked_within(float(value))
    elif verb == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif verb == "hang":
        while True:
            time.sleep(60)
    elif verb == "exit":
        note(f"exit-{value}")
        os._exit(int(value))
    elif verb == "crash-first" and first_time():
        os._exit(int(value))
    elif verb == "killed-first" and first_time():
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "error":
        tell(f"ERROR={value}")
    elif verb == "fenced":
        tell(f"FENCED={value}")
    elif verb == "say":
        print(value, flush=True)
    elif verb == "chatter":
        for number in range(int(value)):
            print(f"line {number} " + "x" * 100)
        sys.stdout.flush()
    elif verb == "wait-for":
        while not Path(value).exists() and not asked:
            time.sleep(0.01)
    elif verb == "grandchild":
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("grandchild")
            while True:
                time.sleep(60)
    elif verb == "environment":
        note(f"{value}={os.environ.get(value)}")
note("exit")
