"""The front door: OpenAI-compatible HTTP and gRPC Generate in, text out."""
