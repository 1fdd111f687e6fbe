"""The artifact store: result folders addressed by what produced them, images addressed by content, versioned tables."""
