"""What is wrong with the hardware and the system of a node, whether it affects a job or not."""
