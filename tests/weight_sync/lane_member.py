"""A server's process as far as weights go: python lane_member.py [DEVICE]

Reads descriptions of versions from stdin, brings each as our plug-in does, and answers with a line: how many of its
files came over HTTP, and the last value of each tensor or the error. With DEVICE, it uses that CUDA device.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

import streamrl.servers.plugin.streamrl_engine.files as files

over_http = []
download = files._download


def noted(url, target, *more):
    if not target.exists():
        over_http.append(url)
    download(url, target, *more)


files._download = noted


def main():
    if len(sys.argv) > 1:
        torch.zeros(1, device=f"cuda:{sys.argv[1]}")
        torch.cuda.set_device(int(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STREAMRL_LANDING"] = folder
        landing = files.Landing()
        while line := sys.stdin.readline():
            over_http.clear()
            source = files.Source(**json.loads(line))
            answer = {"version": source.url.rpartition("-")[2]}
            try:
                here = landing.bring(source, lambda mine: [mine])
                answer["values"] = [tensor.view(-1)[-1].item() for _, tensor in files.Opened(here).tensors()]
                landing.clear(keep=here)
                assert sorted(entry.name for entry in Path(here.folder).iterdir()) == sorted(source.files)
            except files.BadVersion as error:
                answer["error"] = str(error)
            answer["http"] = len(over_http)
            answer["group"] = landing._member._group.name if landing._member._group else ""
            print(json.dumps(answer), flush=True)


main()
