"""The product without any door: words, stores, use cases."""
