"""What all gRPC edges share: conversions, error mapping, channel settings, tickets."""
