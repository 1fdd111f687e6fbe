"""The environment `alfworld/text`: games in the text engine, run by processes that many episodes share."""
