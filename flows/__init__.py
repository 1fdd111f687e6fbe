if __name__ != "armature.flows":  # a second copy of every class would be another class
    raise ImportError("import armature.flows, not flows")
