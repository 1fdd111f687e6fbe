"""Games in the text engine, played by processes that many episodes share."""
