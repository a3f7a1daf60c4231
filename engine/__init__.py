"""Compute of one rank: scheduler, page pool, prefix cache, runner, sampler. Knows no network."""
