"""What all edges share: conversions, errors, channel settings, tickets; probes and traces."""
