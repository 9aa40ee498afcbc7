"""Looking at runs: from their folders alone, in another process, without torch."""
