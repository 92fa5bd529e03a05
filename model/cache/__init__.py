"""The paged KV cache, on the device or on the host. Start with `kv_cache`."""
