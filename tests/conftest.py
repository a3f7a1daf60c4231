"""Settings that hold for every test; nothing heavy is imported here."""

import os

# Two cores run the tests and the processes that they start: one thread a library is enough.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
