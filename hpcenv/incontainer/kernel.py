"""Start a Jupyter kernel that listens on no TCP port.

Runs on: inside the image (or in a host environment), with ipykernel; Python 3.8 and newer.

With `transport=ipc` the channels of a kernel are Unix sockets. However, ipykernel (5 to 7.4, `iostream.py`) also binds
a TCP socket to 127.0.0.1, for the output of forked processes. This module replaces the TCP socket by a Unix socket.
"""

import os
import sys
from typing import Any, Tuple

# The modules beside this file must not hide modules of the user.
del sys.path[0]

import zmq
from ipykernel.iostream import IOPubThread
from ipykernel.kernelapp import launch_new_instance
from zmq.eventloop.zmqstream import ZMQStream

_ADDRESS = "ipc://%s/output-%d" % (os.environ["JUPYTER_RUNTIME_DIR"], os.getpid())


def _listen(self: Any) -> None:
    self._pipe_uuid = os.urandom(16)
    pipe = self.socket.context.socket(zmq.PULL)
    pipe.linger = 0
    pipe.bind(_ADDRESS)
    self._pipe_in = ZMQStream(pipe, self.io_loop)
    self._pipe_in.on_recv(self._handle_pipe_msg)


def _connect(_self: Any) -> Tuple[Any, Any]:
    context = zmq.Context()  # after a fork, a new context is needed
    pipe = context.socket(zmq.PUSH)
    pipe.linger = 3000
    pipe.connect(_ADDRESS)
    return context, pipe


if __name__ == "__main__":
    IOPubThread._setup_pipe_in = _listen
    IOPubThread._setup_pipe_out = _connect
    launch_new_instance()
