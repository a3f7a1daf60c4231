"""Identifiers. NewTypes cost nothing at run time and keep a page from being passed as a slot."""

from typing import NewType

RequestId = NewType("RequestId", str)  # minted by the gateway, random; a caller's id is only echoed
WorkerId = NewType("WorkerId", str)  # stable name of a worker
Incarnation = NewType("Incarnation", str)  # minted with a worker's page pool; voids what is older
BlockKey = NewType("BlockKey", bytes)  # 32 bytes, the name of 16 tokens' KV
PageId = NewType("PageId", int)  # index of a page in a pool
Slot = NewType("Slot", int)  # one attempt at a request, on one stream
LeaseId = NewType("LeaseId", str)
