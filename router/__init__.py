"""Tokens in, tokens out: admission, index mirror, planner, token log. Never imports torch."""
