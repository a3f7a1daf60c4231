"""WorkerService of a prefill worker. The life of a request on this side:

1. `Prefill` arrives with a ticket, while decode already holds a reservation for the request.
   Ticket and tokens are checked; the engine gets the prompt; a hand-off opens under the ticket.
2. The engine computes chunk by chunk and commits full pages. Each `Committed` goes to the reader
   that follows `Progress`; it pins them by name under a lease, and copies while we compute on.
3. The last chunk yields the first token of each choice: they go straight up the router's stream.
   The hand-off record (tokens held, first tokens) is the last event of `Progress`.
4. The KV is held, tail page included, until the reader has verified everything and unpins with
   the ticket; the slot ends. When every choice ended with its first token it ends at once.
5. What else ends it: `CancelSlot`, `Revoke`, its deadline, the router's stream, a reader that is
   silent or never comes. Pages under a reader's lease stay until the lease ends.

`RunWhole` is served too: requests that end with their first token need no decode worker.
"""

from paceline.v1 import worker_pb2
from paceline.worker.front import Side

SIDE = Side(worker_pb2.ROLE_PREFILL, "prefill")
