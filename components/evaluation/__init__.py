"""How good a checkpoint is: every held-out task played once, with intervals that say how sure the number is."""
