"""What a client of an object store raises becomes an OSError, which tiers expect."""

import io
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from paceline.kv_transfer.tiers import object_medium
from paceline.kv_transfer.tiers.object_medium import ObjectMedium

pytest.importorskip("botocore")


class BrokenBody(io.RawIOBase):
    def readinto(self, buffer: Any) -> int:
        from urllib3.exceptions import SSLError

        raise SSLError("the record is cut off")  # botocore lets it through


class SlowBody(io.RawIOBase):
    """A few bytes at a time, without end."""

    def readinto(self, buffer: Any) -> int:
        time.sleep(0.01)
        return min(len(buffer), 16)


@dataclass
class Client:
    stored: list[str] = field(default_factory=list)
    body: io.RawIOBase = field(default_factory=BrokenBody)
    pages: list[dict[str, Any]] = field(default_factory=list)

    def head_bucket(self, **_: Any) -> None:
        pass

    def get_object(self, **_: Any) -> dict[str, Any]:
        return {"Body": self.body}

    def put_object(self, *, Key: str, **_: Any) -> None:
        self.stored.append(Key)

    def get_paginator(self, _: str) -> "Client":
        return self

    def paginate(self, **_: Any) -> Iterator[dict[str, Any]]:
        return itertools.chain(self.pages, itertools.repeat({"IsTruncated": True, "Contents": []}))

    def close(self) -> None:
        pass

    def delete_object(self, **_: Any) -> None:
        from botocore.exceptions import ClientError

        answer = {"ResponseMetadata": {"HTTPStatusCode": 403}}
        raise ClientError(answer, "DeleteObject")


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def medium(client: Client) -> ObjectMedium:
    with mock.patch.object(object_medium, "_new_client", return_value=client):
        return ObjectMedium("tiers[0]", "bucket", "prefix", "", "")


def test_a_body_that_breaks_off_is_an_error_of_the_store(medium: ObjectMedium) -> None:
    with pytest.raises(OSError, match="SSLError"):
        medium.read_into(1, 0, memoryview(bytearray(4096)))


@pytest.mark.parametrize(
    "pages",
    [
        [],  # a list without end
        [{"ResponseMetadata": {"HTTPStatusCode": 200}}],  # another page than a list: of a portal
        [{"IsTruncated": False, "Contents": [{"Key": "prefix/0000000000000001"}]}],  # no size
    ],
)
def test_what_is_no_list_does_not_seem_an_empty_one(
    medium: ObjectMedium, client: Client, pages: list[dict[str, Any]]
) -> None:
    """Else what is there would be written over, and not count."""
    client.pages = pages
    with pytest.raises(OSError, match="store"):
        medium.sizes()


def test_a_store_that_drips_gives_its_thread_back(
    medium: ObjectMedium, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a store that was slow for a while would have no threads left when it is fast again."""
    monkeypatch.setattr(object_medium, "READ_S", 0.1)
    client.body = SlowBody()
    with pytest.raises(TimeoutError, match="too slow"):
        medium.read_into(1, 0, memoryview(bytearray(1 << 20)))


def test_nothing_is_stored_in_the_place_of_what_is_not_deleted(
    medium: ObjectMedium, client: Client
) -> None:
    with pytest.raises(OSError, match="answers 403"):
        medium.write(2, memoryview(bytes(4096)), reuse=1)
    assert client.stored == []
