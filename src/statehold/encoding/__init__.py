"""The encodings of single things: safetensors headers, plain values, strict JSON. Pure."""
