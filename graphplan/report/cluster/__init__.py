"""Text, page and timeline of a plan over several machines. In: a `ClusterPlan`. Out: text."""
