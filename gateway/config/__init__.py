"""config.toml: names, checks, revision, and what every process derives from it."""
