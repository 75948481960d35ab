"""The kernels of every chapter: one module each, the one source of what the book shows."""
