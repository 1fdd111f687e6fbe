"""Distribution that is installed into vLLM's environment. Its only package is `armature_served`."""
