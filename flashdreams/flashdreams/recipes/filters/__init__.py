"""Post-processors without weights, which come with the runtime."""
