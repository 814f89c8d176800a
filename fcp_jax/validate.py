"""Proof, from the plan alone, that it computes the attention it was made for."""


class InvalidPlanError(ValueError):
    """x."""


def validate_plan(plan):
    pass
