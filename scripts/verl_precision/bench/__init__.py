"""Model the memory of a job, and measure the cost of a precision."""
