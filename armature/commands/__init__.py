"""The commands of `armature`, in groups. Each imports what it needs when it runs, so that `--help` is fast."""
