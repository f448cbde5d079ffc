"""Several machines as data: stages, microbatches on their way, and the plan of all."""
