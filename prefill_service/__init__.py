"""The prefill role: computes prompts and holds their KV until a reader has it."""
