"""Code that all model families share: base classes, layers, decode-time state, options, files."""
