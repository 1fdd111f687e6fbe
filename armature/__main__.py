from armature.cli import main

main()
