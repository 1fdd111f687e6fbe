if __name__ != "armature.tasks":  # a second copy of every class would be another class
    raise ImportError("import armature.tasks, not tasks")
