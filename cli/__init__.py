"""The `paceline` command: starts services, prepares the demo model, runs a whole deployment."""
