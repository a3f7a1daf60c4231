"""What both roles share: a front process that talks and a rank process that computes."""
