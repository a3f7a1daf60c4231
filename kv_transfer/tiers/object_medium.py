"""A bucket of an S3-compatible object store, through boto3 (the extra `s3`).

Credentials come from where the SDK looks for them: environment, files, the machine's role. The
SDK's own checksums are off where they are optional: pages and indices have theirs.
"""

import contextlib
import errno
import io
import re
import time
from collections.abc import Iterator
from typing import Any

from paceline.core.errors import ConfigError

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0  # of silence
START_TIMEOUT_S = 3.0  # of silence, while a worker waits for the first answer
READ_S = 10.0  # of one range: who asked for it has gone long before, and others wait for the thread
PART_BYTES = 64 << 10  # between two looks at the time
MAX_ATTEMPTS = 2
MAX_LISTS = 4096  # of a thousand objects each
_NUMBER = re.compile("[0-9a-f]{16}")
_REFUSED = (301, 400, 403, 404)  # what no later attempt would change


class ObjectMedium:
    """Objects under `prefix`, which no other process may use."""

    num_readers = 8

    def __init__(self, field: str, bucket: str, prefix: str, endpoint: str, region: str) -> None:
        """Raises ConfigError, naming `field`, when there is no such bucket, or none for us."""
        self._client = _new_client(field, endpoint, region, READ_TIMEOUT_S, MAX_ATTEMPTS)
        self._bucket = bucket
        self._prefix = prefix
        asking = _new_client(field, endpoint, region, START_TIMEOUT_S, 1)
        try:
            asking.head_bucket(Bucket=bucket)
        except Exception as error:  # the errors of boto3 share no base class
            status = _status(error)
            reason = f"cannot be used: the store answers {status}"
            ConfigError.check(f"{field}.bucket", bucket, status not in _REFUSED, reason)
        finally:
            asking.close()

    def sizes(self) -> dict[int, int]:
        pages = self._client.get_paginator("list_objects_v2")
        found: dict[int, int] = {}
        with _os_errors():
            lists = pages.paginate(Bucket=self._bucket, Prefix=self._prefix + "/")
            for number, page in enumerate(lists):
                if "IsTruncated" not in page or number >= MAX_LISTS:  # else it would seem empty
                    raise OSError(errno.EIO, "the store does not answer with a list")
                for item in page.get("Contents", ()):
                    name = item["Key"].removeprefix(self._prefix + "/")
                    if _NUMBER.fullmatch(name):
                        found[int(name, 16)] = item["Size"]
        return found

    def write(self, number: int, data: memoryview, reuse: int | None = None) -> None:
        if reuse is not None:
            self.delete(reuse)
        with _os_errors():
            self._client.put_object(**self._object(number), Body=io.BytesIO(data))

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        ends = time.monotonic() + READ_S
        wanted = f"bytes={offset}-{offset + len(buffer) - 1}"
        with _os_errors():
            body = self._client.get_object(**self._object(number), Range=wanted)["Body"]
            with contextlib.closing(body):
                num_read, count = 0, -1
                while num_read < len(buffer) and count:
                    if time.monotonic() > ends:
                        raise TimeoutError(errno.ETIMEDOUT, "the store is too slow")
                    count = body.readinto(buffer[num_read : num_read + PART_BYTES])
                    num_read += count
        if num_read < len(buffer):
            raise OSError(errno.EIO, "the object is shorter than it was")

    def delete(self, number: int) -> None:
        with _os_errors():
            self._client.delete_object(**self._object(number))

    def close(self) -> None:
        self._client.close()

    def _object(self, number: int) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{number:016x}"}


def _new_client(
    field: str, endpoint: str, region: str, read_timeout_s: float, max_attempts: int
) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        retries={"total_max_attempts": max_attempts, "mode": "standard"},
        max_pool_connections=ObjectMedium.num_readers + 2,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if endpoint else None,
    )
    try:
        return boto3.client(
            "s3", endpoint_url=endpoint or None, region_name=region or None, config=config
        )
    except ValueError:
        raise ConfigError(f"{field}.endpoint", endpoint, "must be a URL") from None


def _status(error: Exception) -> int:
    """Of the store's answer; 0 if there was none."""
    answer = getattr(error, "response", None) or {}
    status: int = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """What the SDK raises, as the OSError that a medium may raise."""
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (BotoCoreError, ClientError, HTTPError) as error:  # bodies let urllib3's through
        status = _status(error)
        code = errno.ENOENT if status == 404 else errno.EIO
        reason = f"the store answers {status}" if status else type(error).__name__
        raise OSError(code, reason) from None
    except (KeyError, RecursionError) as error:  # of answers that the SDK takes for good ones
        reason = f"the store's answer cannot be read: {type(error).__name__}"
        raise OSError(errno.EIO, reason) from None
