"""Beats: what every long-lived stream carries when there is nothing to say.

A peer that beats less often than this is taken for dead by peers whose settings are the defaults.
"""

MAX_BEAT_S = 1.0
