"""Dead letters for whoever has to decide about them: read without loss, indexed, replayed, dropped."""
