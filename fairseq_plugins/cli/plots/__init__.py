"""The commands ``plot-attention``, ``plot-branches`` and ``plot-loss``."""
