if __name__ != "armature.components":  # a second copy of every class would be another class
    raise ImportError("import armature.components, not components")
