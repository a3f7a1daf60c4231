"""Wiring of layers per architecture, config reading, weight loading. One file a family."""
