"""The distribution that is installed beside vLLM; `armature_served` is its package."""
