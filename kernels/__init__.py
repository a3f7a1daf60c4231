"""Hot loops as plain tensor functions, compiled or Triton; each has a torch reference beside it."""
