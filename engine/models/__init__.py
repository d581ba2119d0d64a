"""Decoders: what is computed, given operations, weights and a place for KV."""
