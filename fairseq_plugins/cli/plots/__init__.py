"""``fairseq-plugins plot-attention``, ``plot-branches`` and ``plot-loss``."""
