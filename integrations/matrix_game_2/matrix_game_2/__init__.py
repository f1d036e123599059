"""Matrix-Game-2: a world that is walked through with keyboard and mouse."""
