"""LeRobotDataset v3.0, the layout that robot datasets are shared in, read and written without lerobot."""
