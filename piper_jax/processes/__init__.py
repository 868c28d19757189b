"""Several processes that run one plan together: how they start, meet, stop, and notice that one is lost."""
