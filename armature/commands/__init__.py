"""What `armature` can be told. Every command imports what it needs when it runs, so that `--help` is quick."""
