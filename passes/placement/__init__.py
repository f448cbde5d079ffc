"""Placement: a problem enters, a placement with a lower bound on every other leaves."""
