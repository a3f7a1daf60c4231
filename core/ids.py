"""Identifiers. NewTypes cost nothing at run time and keep one from being passed as another."""

from typing import NewType

WorkerId = NewType("WorkerId", str)  # stable name of a worker
Incarnation = NewType("Incarnation", str)  # minted with a worker's page pool; voids what is older
BlockKey = NewType("BlockKey", bytes)  # 32 bytes, the name of 16 tokens' KV
LeaseId = NewType("LeaseId", str)
