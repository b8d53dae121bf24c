"""What is wrong with the hardware and the system of a node, whatever that does to a job."""
