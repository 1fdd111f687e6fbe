"""Robot policies: vision-language-action models and what turns observations into their inputs."""
