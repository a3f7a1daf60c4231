"""Prefill workers that take a job and then say nothing more: processes to be killed.

Run as a program with a number, a worker's process id and its DescribeResponse in hex: forks as many
processes, each of which has its own incarnation, exports a copy of that worker's pool over tcp, and
writes a line when it is up and one for each reader that follows. It ends with its standard input.
"""

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import LocalPool, TransportSettings
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory
from paceline.v1 import kv_pb2
from tests.support.kv_proxy import SERVICE
from tests.support.workers import SECRET, pool_of


def main() -> None:
    described = kv_pb2.DescribeResponse.FromString(bytes.fromhex(sys.argv[3]))
    with pool_of(int(sys.argv[2])) as fd:
        content = os.pread(fd, os.fstat(fd).st_size, 0)
    children = []
    for number in range(int(sys.argv[1])):
        if (pid := os.fork()) == 0:
            serve(number, described, content)
        children.append(pid)
    sys.stdin.read()
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def serve(number: int, described: kv_pb2.DescribeResponse, content: bytes) -> None:
    theirs = described.groups[0]
    group = PageGroup(
        theirs.name, theirs.num_layers, theirs.num_heads, theirs.head_dim, theirs.dtype
    )
    memory = size_pool_memory(new_pool_file(), len(content))
    memory.view[:] = content
    incarnation = f"mute-{number}"
    pool = LocalPool(memory.view, group, len(content) // group.page_bytes)
    settings = TransportSettings(incarnation, secret=SECRET.encode())
    source = registry.make_source("tcp", pool, settings)
    source.start()
    described.worker_id, described.incarnation = f"mute-{number}", incarnation
    del described.transports[:]
    described.transports.add(name="tcp", address=source.address())
    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers((Mute(described, number),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    tell(number=number, pid=os.getpid(), port=port, incarnation=incarnation)
    threading.Event().wait()


def tell(**what: object) -> None:
    """One write a line: the processes share the output."""
    os.write(1, (json.dumps(what) + "\n").encode())


class Mute(grpc.GenericRpcHandler):
    def __init__(self, described: kv_pb2.DescribeResponse, number: int) -> None:
        self._described, self._number = described, number

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = details.method.removeprefix(f"/{SERVICE}/")
        if method == "Describe":
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: self._described.SerializeToString()
            )
        if method == "Progress":
            return grpc.unary_stream_rpc_method_handler(self._follow)
        return None

    def _follow(self, request: bytes, context: grpc.ServicerContext) -> Any:
        tell(number=self._number, followed=True)
        threading.Event().wait()
        yield b""


if __name__ == "__main__":
    main()
