"""What a client of an object store raises becomes an OSError, which tiers expect."""

import io
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


@dataclass
class Client:
    stored: list[str] = field(default_factory=list)

    def head_bucket(self, **_: Any) -> None:
        pass

    def get_object(self, **_: Any) -> dict[str, Any]:
        return {"Body": BrokenBody()}

    def put_object(self, *, Key: str, **_: Any) -> None:
        self.stored.append(Key)

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


def test_nothing_is_stored_in_the_place_of_what_is_not_deleted(
    medium: ObjectMedium, client: Client
) -> None:
    with pytest.raises(OSError, match="answers 403"):
        medium.write(2, memoryview(bytes(4096)), reuse=1)
    assert client.stored == []
