"""`armature drill`: disturb short runs of a recipe, and compare them with a run that is left alone."""
