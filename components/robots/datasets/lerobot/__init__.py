"""Reader and writer of LeRobotDataset v3, the common format of robot datasets, independent of the lerobot package."""
