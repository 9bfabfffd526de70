"""Model the memory of a job, and measure what a precision costs."""
