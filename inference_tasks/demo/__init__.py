"""The demo: real files through a real model, in three tiers and then in one FIFO queue, on the same worker."""
