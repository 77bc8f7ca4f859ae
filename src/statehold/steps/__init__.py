"""Where steps are: a Shelf to read them, a Target to write copies; the commit protocol, retention,
and who may write. Never touches torch."""
