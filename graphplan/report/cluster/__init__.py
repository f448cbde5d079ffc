"""Text, page and timeline of a plan over several machines. Input: a `ClusterPlan`. Output: text."""
