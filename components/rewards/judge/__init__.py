"""Another model grades: it is asked over HTTP, and what it says is kept, so that nothing is asked twice."""
