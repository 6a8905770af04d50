"""Ada-KV: a layer's budget is shared out between its heads."""
