"""Moves pages of KV between pools: sources export, readers copy and verify. Knows no engine."""
