"""ALFWorld's household tasks as text games (`alfworld/text`) and in the simulator AI2-THOR (`alfworld/thor`)."""
