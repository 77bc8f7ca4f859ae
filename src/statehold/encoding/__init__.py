"""How single things are written: safetensors headers, plain values, strict JSON. Pure."""
