"""The reward `judge`: another model grades over HTTP. Its replies are cached on disk, so no question is sent twice."""
