"""Words shared by all parts: ids, block keys, KV layout, sampling, errors."""
