"""The decode role: pulls KV by name and generates tokens; runs short requests whole."""
