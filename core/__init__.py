"""Words shared by every part: ids, block keys, KV layout, sampling, errors. Imports nothing of ours."""
