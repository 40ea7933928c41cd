"""Code that all model families share: base classes, layers, decode-time state, a schedule, options and files."""
