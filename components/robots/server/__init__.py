"""Robot policies over a websocket: observations in, chunks of actions out."""
