"""WorkerService of a decode worker. The life of a request on this side:

1. `Reserve`: pages for the prompt and credit for a window of output, or `Busy`. What the prefix
   cache holds already needs no pull. A reservation that nobody adopts is dropped in time.
2. `Adopt` names ticket and source. The source is described and linked once an incarnation; its
   `Progress` is followed; each newly committed range is pinned by name, copied into the reserved
   pages by a thread, verified against the checksums of the pin, and told to the engine. The
   request waits for its KV: it has pages, but no place in the batch.
3. The record ends `Progress`: the tail page is pinned by ticket and pulled; the first tokens,
   which the router has from prefill, join the batch here; the source is told to let go.
4. Every later token goes up the router's stream, one frame a step.
5. A source that dies, stalls or sends wrong bytes ends the slot with KV_UNAVAILABLE: the router
   plans again, and committed pages need no second pull. A cancel waits for one piece of a copy.

`RunWhole` is served too: short prompts are computed here.
"""

from paceline.v1 import worker_pb2
from paceline.worker.front import Side

SIDE = Side(worker_pb2.ROLE_DECODE, "decode")
