"""ALFWorld: household tasks as text games (`alfworld/text`) and in AI2-THOR (`alfworld/thor`), and their games."""
